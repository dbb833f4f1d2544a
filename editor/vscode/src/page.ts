/** The page of `stepscope view` in a tab: a frame that asks the extension, which asks the server beside it, also over SSH. */

import { randomBytes } from "node:crypto";
import * as vscode from "vscode";

const panels = new Map<string, vscode.WebviewPanel>();

interface Asked {
  id: number;
  address: string;
}

/** Show the page that a server on this machine has; the part of the address behind # is what it shows first. */
export async function showPage(address: string): Promise<void> {
  const { origin, searchParams, hash } = new URL(address);
  const headers = { cookie: await cookie(address) };
  const answer = await fetch(`${origin}/frame`, { headers });
  if (!answer.ok) throw new Error(`stepscope: the page answers ${answer.status}`);
  const page = await answer.text();
  const key = searchParams.get("token") ?? origin;
  const panel = panels.get(key) ?? vscode.window.createWebviewPanel("stepscope", "stepscope", vscode.ViewColumn.Beside, {
    enableScripts: true,
    retainContextWhenHidden: true,
  });
  if (!panels.has(key)) {
    panels.set(key, panel);
    panel.onDidDispose(() => panels.delete(key));
    panel.webview.onDidReceiveMessage(async ({ id, address }: Asked) => {
      const found = await document(`${origin}/api/`, address, headers).catch((error: Error) => ({ status: 503, body: String(error) }));
      await panel.webview.postMessage({ stepscope: "answer", id, ...found });
    });
  }
  const chosen = `<html data-theme="${theme()}" data-address="${hash.slice(1).replaceAll('"', "%22")}"`;
  panel.webview.html = around(page.replace("<html", () => chosen)); // a text would have $& and the like replaced
  panel.reveal();
}

/** A document of the server; nothing else of it, wherever the address that the page gives leads. */
async function document(documents: string, address: string, headers: Record<string, string>): Promise<{ status: number; body: string }> {
  const asked = new URL(documents + address);
  if (!asked.href.startsWith(documents)) return { status: 404, body: "" };
  const answer = await fetch(asked, { headers });
  return { status: answer.status, body: await answer.text() };
}

/** What the server gives for the token in the address. */
async function cookie(address: string): Promise<string> {
  const answer = await fetch(address, { redirect: "manual" });
  return answer.headers.getSetCookie().map((each) => each.split(";")[0]).join("; ");
}

function theme(): string {
  const { Light, HighContrastLight } = vscode.ColorThemeKind;
  return [Light, HighContrastLight].includes(vscode.window.activeColorTheme.kind) ? "light" : "dark";
}

/** A document that has the page in a frame of its own origin, and hands messages on between it and the extension. */
function around(page: string): string {
  const nonce = randomBytes(16).toString("base64");
  const escaped = page.replaceAll("&", "&amp;").replaceAll('"', "&quot;");
  return `<!doctype html>
<html style="height:100%;overflow:hidden"><body style="margin:0;padding:0;height:100%">
<iframe sandbox="allow-scripts allow-popups allow-downloads" style="display:block;border:0;width:100%;height:100%" srcdoc="${escaped}"></iframe>
<script nonce="${nonce}">
const code = acquireVsCodeApi();
const frame = document.querySelector("iframe");
addEventListener("message", ({ source, data }) => {
  if (source === frame.contentWindow) {
    if (data?.stepscope === "ask") code.postMessage({ id: data.id, address: String(data.address) });
  } else if (data?.stepscope === "answer") frame.contentWindow.postMessage(data, "*");
});
</script>
</body></html>`;
}
