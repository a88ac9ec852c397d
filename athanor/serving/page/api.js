// Requests to the server, all of the same origin. Failures are `Problem`s with a text for people.

import { copyOf, openDialog } from "./dom.js";

const KEY = "athanor-key";

/** kind: "gone" (no server), "request" (4xx), "model" (503 or a model that failed). */
export class Problem extends Error {
  constructor(message, kind) {
    super(message);
    this.kind = kind;
  }
}

const GONE = "The server did not answer: is it running (make serve), and this device online? Nothing you typed is lost.";

/** Listeners get true when the server answers and false when it does not. */
export const contact = new EventTarget();

const report = (detail) => contact.dispatchEvent(new CustomEvent("change", { detail }));

async function request(path, { method = "GET", body, signal } = {}) {
  const text = body === undefined ? undefined : JSON.stringify(body);
  const keepalive = method === "PUT" && text.length < 10_000; // a vote outlives its page, where browsers allow
  for (;;) {
    const headers = {};
    const key = sessionStorage.getItem(KEY);
    if (key) headers.Authorization = `Bearer ${key}`;
    if (body !== undefined) headers["Content-Type"] = "application/json";
    let answer;
    try {
      answer = await fetch(path, { method, headers, signal, keepalive, body: text });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      report(false);
      throw new Problem(GONE, "gone");
    }
    report(true);
    if (answer.status === 401 && (await askKey(Boolean(key)))) continue;
    if (answer.ok) return answer;
    throw new Problem(await reason(answer), answer.status >= 500 ? "model" : "request");
  }
}

/** Why it failed; of what is not one of our answers the status has to do. */
async function reason(answer) {
  const told = await answer.json().catch(() => null);
  return told?.error?.message || `The server answered ${answer.status} ${answer.statusText}.`;
}

export async function getJson(path) {
  return (await request(path)).json();
}

/** Returns what the server sent, null for nothing. */
export async function send(method, path, body = {}) {
  const answer = await request(path, { method, body });
  return answer.status === 204 ? null : answer.json();
}

/** The events of an answer as they come. Problem "gone" if the stream breaks before its last event. */
export async function* answers(body, signal) {
  const answer = await request("/api/answers", { method: "POST", body, signal });
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let text = ""; ;) {
    const { done, value } = await reader.read().catch((error) => {
      if (error.name === "AbortError") throw error;
      return { done: true };
    });
    if (done) {
      report(false);
      throw new Problem("The connection broke in the middle of the answer. " + GONE, "gone");
    }
    const events = (text + value).split("\n\n");
    text = events.pop();
    for (const event of events.map((one) => JSON.parse(one.slice("data: ".length)))) {
      if (event.type === "done") return void reader.read().catch(() => {}); // take the end of the stream, else it counts as broken
      yield event;
    }
  }
}

let asking = null;

/** Ask for the key once, however many requests wait for it; true if one was given. */
function askKey(wrong) {
  asking ??= new Promise((resolve) => {
    const form = copyOf("ask-key");
    const field = form.querySelector("input");
    form.querySelector("span").hidden = !wrong;
    const dialog = openDialog("This server asks for a key", "box", form);
    dialog.addEventListener("close", () => {
      asking = null;
      const key = field.value.replace(/[^!-~]/g, ""); // what a header can carry; a key has nothing else
      if (key) sessionStorage.setItem(KEY, key);
      resolve(Boolean(field.value));
    });
  });
  return asking;
}
