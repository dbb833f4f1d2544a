// The page as a widget of a notebook: a frame apart from the notebook, which asks the kernel through the widget's messages.

const PATIENCE_MS = 5000;

function isDark() {
  const { jpThemeLight } = document.body.dataset;
  if (jpThemeLight !== undefined) return jpThemeLight === "false";
  const names = `${document.documentElement.className} ${document.body.className}`;
  if (/vscode-(dark|high-contrast)\b/.test(names) || /(^|\s)dark(\s|$)/.test(names)) return true;
  return matchMedia("(prefers-color-scheme: dark)").matches && !/vscode-light|(^|\s)light(\s|$)/.test(names);
}

function render({ model, el }) {
  const view = crypto.getRandomValues(new Uint32Array(2)).join("-"); // answers go to all views of a widget
  const frame = document.createElement("iframe");
  frame.title = "stepscope";
  frame.setAttribute("sandbox", "allow-scripts allow-popups allow-popups-to-escape-sandbox allow-downloads");
  frame.allow = "clipboard-write";
  frame.style.cssText = `box-sizing:border-box;width:100%;height:${Number(model.get("height"))}px;border:1px solid rgba(128,128,128,.35);border-radius:6px`;
  const note = document.createElement("p");
  const late = setTimeout(() => {
    note.textContent = "The kernel does not answer: it may be running a cell, or have ended since. In that case, run this cell again.";
  }, PATIENCE_MS);
  el.append(note);

  const asked = ({ source, data }) => {
    if (source === frame.contentWindow && data?.stepscope === "ask") model.send({ view, ask: data.id, address: String(data.address) });
  };
  const answered = (message) => {
    if (message?.view !== view) return;
    if (message.page === undefined) {
      frame.contentWindow?.postMessage({ stepscope: "answer", id: message.ask, status: message.status, body: message.body }, "*");
      return;
    }
    clearTimeout(late);
    frame.srcdoc = message.page.replace("<html", `<html data-theme="${isDark() ? "dark" : "light"}"`);
    const hidden = document.createElement("style"); // the page takes the place of what a saved notebook shows
    hidden.textContent = `.${message.static}{display:none}`;
    note.replaceWith(frame, hidden);
  };
  window.addEventListener("message", asked);
  model.on("msg:custom", answered);
  model.send({ view });
  return () => {
    clearTimeout(late);
    window.removeEventListener("message", asked);
    model.off("msg:custom", answered);
  };
}

export default { render };
