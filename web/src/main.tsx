import { render } from "preact";
import { useEffect, useMemo, useState } from "preact/hooks";
import { isChanged, isFile, isPromised } from "./data";
import { useDocument } from "./document";
import { isToCome, usePolled } from "./polled";
import { Failed, Loading } from "./parts/controls";
import { Navigation, Shortcuts, Top, useKeys } from "./parts/shell";
import { startTooltip } from "./parts/tooltip";
import type { Session } from "./schema";
import { parameter, view } from "./state";
import "./style.css";
import { VIEWS } from "./views";

function Page() {
  const session = useDocument("session");
  if (session.error !== undefined) {
    return (
      <main id="main">
        <Failed>{session.error}</Failed>
      </main>
    );
  }
  return session.value ? <Views session={session.value} /> : <Loading height={400} />;
}

/** The view that a session begins with: of several ranks, that of all. */
const first = (session: Session) => (session.kind === "ranks" && parameter("rank") === null ? "ranks" : "overview");

/** Of ranks: findings promise what the job saves as soon as the server has diagnosed all of them. */
function Promises() {
  const ranks = usePolled("ranks", {}, isToCome).value;
  const isKnown = (ranks?.saves_ns ?? null) !== null;
  useEffect(() => {
    isPromised.value = isKnown;
  }, [isKnown]);
  return null;
}

function Views({ session }: { session: Session }) {
  const [isHelping, help] = useState(false);
  const views = useMemo(() => VIEWS.filter((each) => each.needs.every((name) => session.documents.includes(name))), [session]);
  const shown = views.find((each) => each.name === (view.value ?? first(session))) ?? views[0];
  useKeys(views, () => help(true));
  useEffect(() => {
    document.title = `${shown?.title ?? ""} · ${session.title} · stepscope`;
    scrollTo(0, 0);
  }, [shown, session]);
  return (
    <>
      <Top title={session.title} onHelp={() => help(true)} />
      <Navigation views={views} shown={shown} />
      <main id="main" tabIndex={-1}>
        {isChanged.value && (
          <p class="changed" role="status">
            The trace has been written again since this page read it.
            <button type="button" onClick={() => location.reload()}>Reload</button>
          </p>
        )}
        {!isFile && session.documents.includes("ranks") && <Promises />}
        {shown && <shown.Component key={shown.name} />}
        {session.left_out.map((sentence) => (
          <p class="muted small">{sentence}</p>
        ))}
      </main>
      <Shortcuts views={views} open={isHelping} onClose={() => help(false)} />
    </>
  );
}

startTooltip();
render(<Page />, document.getElementById("page")!);
