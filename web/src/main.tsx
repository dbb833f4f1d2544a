import { render } from "preact";
import { useDocument } from "./document";
import { show, view } from "./state";
import "./style.css";
import { VIEWS } from "./views";

function Page() {
  const session = useDocument("session");
  if (session.error) return <p class="error">{session.error}</p>;
  if (!session.value) return <p>Reading…</p>;
  const have = session.value.documents;
  const views = VIEWS.filter((each) => each.needs.every((name) => have.includes(name)));
  const shown = views.find((each) => each.name === view.value) ?? views[0];
  return (
    <>
      <header>
        <h1>{session.value.title}</h1>
        <nav>
          {views.map((each) => (
            <button type="button" aria-current={each === shown ? "page" : undefined} onClick={() => show(each.name)}>
              {each.title}
            </button>
          ))}
        </nav>
      </header>
      <main>{shown && <shown.Component />}</main>
    </>
  );
}

render(<Page />, document.getElementById("page")!);
