/** Where documents come from: the server that stepscope view started, a notebook's kernel, or the report file itself. */

import { signal as state } from "@preact/signals";
import type { Documents } from "./schema";
import { isFramed, parameter } from "./state";

export type Parameters = Record<string, string | number>;

const embedded = readEmbedded();

export const isFile = embedded !== null;

/** Whether a trace was written again since the server read it. */
export const isChanged = state(false);

/** Whether the server has diagnosed all ranks, so that findings promise what the job saves. */
export const isPromised = state(false);

/** The run, how many traces it had, and the rank that the address chooses; "runs", "watch" and "ranks" are about all of them. */
export function scope(name: string): Parameters {
  const chosen = name === "runs" || name === "watch" ? [] : name === "ranks" ? ["run", "traces"] : ["run", "traces", "rank"];
  const found = Object.fromEntries(chosen.flatMap((each) => (parameter(each) === null ? [] : [[each, parameter(each)!]])));
  return name === "diagnosis" && isPromised.value ? { ...found, job: "yes" } : found;
}

/** A document by its name; the server and the report file answer with the same schema. */
export async function fetchDocument<Name extends string & keyof Documents>(
  name: Name,
  parameters: Parameters = {},
  signal?: AbortSignal,
): Promise<Documents[Name]> {
  const address = addressOf(name, parameters);
  if (embedded !== null) {
    if (!(address in embedded)) throw new Unavailable(`This report has no ${name}. Run stepscope view for all of it.`);
    return embedded[address] as Documents[Name];
  }
  return (await (await answerOf(address, signal)).json()) as Documents[Name];
}

/** A document as the server sends it, to be handed on. */
export const fetchBytes = async (name: string): Promise<ArrayBuffer> => (await answerOf(addressOf(name, {}))).arrayBuffer();

/** Have the server do something; it answers once that has begun. */
export const act = async (name: string, parameters: Parameters): Promise<void> => void (await answerOf(addressOf(name, parameters), undefined, "POST"));

function addressOf(name: string, parameters: Parameters): string {
  const query = new URLSearchParams(Object.entries({ ...scope(name), ...parameters }).map(([key, value]) => [key, String(value)]));
  query.sort();
  return query.size ? `${name}?${query}` : name;
}

async function answerOf(address: string, signal?: AbortSignal, method = "GET"): Promise<Response> {
  const answer = isFramed ? await askAround(address, signal) : await askServer(address, signal, method);
  if (answer.headers.has("stepscope-changed")) isChanged.value = true;
  if (!answer.ok) throw new Unavailable((await answer.json().catch(() => null))?.error ?? answer.statusText);
  return answer;
}

async function askServer(address: string, signal: AbortSignal | undefined, method: string): Promise<Response> {
  return fetch(`api/${address}`, { method, signal: signal ?? null, credentials: "same-origin" }).catch((error: unknown) => {
    throw signal?.aborted ? error : new Unavailable("The server of this page no longer answers: start it again, and open the address that it prints.");
  });
}

const waiting = new Map<number, (answer: Response) => void>();
let asked = 0;

/** Ask the notebook's widget around the frame, which asks the kernel. */
function askAround(address: string, signal?: AbortSignal): Promise<Response> {
  const id = ++asked;
  return new Promise((resolve, reject) => {
    waiting.set(id, resolve);
    signal?.addEventListener("abort", () => {
      waiting.delete(id);
      reject(signal.reason);
    });
    parent.postMessage({ stepscope: "ask", id, address }, "*");
  });
}

if (isFramed) {
  addEventListener("message", ({ source, data }) => {
    if (source !== parent || data?.stepscope !== "answer") return;
    waiting.get(data.id)?.(new Response(data.body, { status: data.status }));
    waiting.delete(data.id);
  });
}

/** A document that cannot be had; the message says why and what to do. */
export class Unavailable extends Error {}

function readEmbedded(): Record<string, unknown> | null {
  const element = globalThis.document?.getElementById("stepscope-documents");
  return element ? (JSON.parse(element.textContent ?? "{}") as Record<string, unknown>) : null;
}
