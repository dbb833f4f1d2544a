/** Hand the trace to Perfetto's page, which reads it in this browser; nothing is asked of it before the reader agrees. */

import { useState } from "preact/hooks";
import { fetchBytes } from "../data";
import { useDocument } from "../document";
import { Dialog } from "./controls";

const ORIGIN = "https://ui.perfetto.dev";
const PATIENCE_MS = 60_000;
const KNOCK_MS = 50;

export function OpenInPerfetto() {
  const session = useDocument("session").value;
  const [isAsking, ask] = useState(false);
  const [said, say] = useState("");
  if (!session?.documents.includes("perfetto")) return null;
  const hand = async () => {
    say("Opening…");
    try {
      await handOver(session.title, ORIGIN);
      ask(false);
      say("");
    } catch (error) {
      say(error instanceof Error ? error.message : String(error));
    }
  };
  return (
    <>
      <button type="button" onClick={() => ask(true)}>
        Open in Perfetto
      </button>
      {isAsking && (
        <Dialog title="Open in Perfetto" onClose={() => ask(false)}>
          <p>
            This opens <b>ui.perfetto.dev</b>, a page of another site, in a new window and hands the trace to it as it is diagnosed here, with idle time by cause and
            the critical path. That page reads it in this browser. Nothing is sent before you click.
          </p>
          <div class="toolbar">
            <button type="button" disabled={said === "Opening…"} onClick={hand}>
              Hand the trace to ui.perfetto.dev
            </button>
            <span role="status" class="small">
              {said}
            </span>
          </div>
        </Dialog>
      )}
    </>
  );
}

/** Open the page, and send it the trace when it says that it listens: PING is answered by PONG. */
async function handOver(title: string, origin: string): Promise<void> {
  const page = open(origin);
  if (!page) throw new Error("The browser did not open the window: allow this page to open one.");
  try {
    const buffer = await fetchBytes("perfetto");
    await answered(page, origin);
    page.postMessage({ perfetto: { buffer, title } }, origin, [buffer]);
  } catch (error) {
    page.close();
    throw error;
  }
}

function answered(page: Window, origin: string): Promise<void> {
  return new Promise((resolve, reject) => {
    const end = (settle: () => void) => {
      clearInterval(knocking);
      clearTimeout(waiting);
      removeEventListener("message", hear);
      settle();
    };
    const hear = ({ source, origin: from, data }: MessageEvent) => {
      if (source === page && from === origin && data === "PONG") end(resolve);
    };
    addEventListener("message", hear);
    const knocking = setInterval(() => (page.closed ? end(() => reject(new Error("The window was closed."))) : page.postMessage("PING", origin)), KNOCK_MS);
    const waiting = setTimeout(() => end(() => reject(new Error("ui.perfetto.dev did not answer; stepscope export writes the file to open there."))), PATIENCE_MS);
  });
}
