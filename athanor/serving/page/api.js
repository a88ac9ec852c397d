// Requests to the server, all of the same origin. Failures are `Problem`s with a text for people.

import { h, openDialog } from "./dom.js";

const KEY = "athanor-key";

/** kind: "gone" (no server), "request" (4xx), "model" (503 or a model that failed). */
export class Problem extends Error {
  constructor(message, kind, status = 0) {
    super(message);
    this.kind = kind;
    this.status = status;
  }
}

const GONE = "The server does not answer. Start it again with athanor serve; nothing you typed is lost.";

/** Listeners get true when the server answers and false when it does not. */
export const contact = new EventTarget();

function report(reached) {
  contact.dispatchEvent(new CustomEvent("change", { detail: reached }));
}

async function request(path, { method = "GET", body, signal } = {}) {
  const text = body === undefined ? undefined : JSON.stringify(body);
  // A change outlives the page that made it, where browsers allow: 64 KiB on their way at a time.
  const keepalive = ["PATCH", "PUT"].includes(method) && text.length < 10_000;
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
    throw new Problem(await reason(answer), answer.status >= 500 ? "model" : "request", answer.status);
  }
}

async function reason(answer) {
  try {
    const { error } = await answer.json();
    if (error?.message) return error.message;
  } catch {
    // Not one of our answers; its status has to do.
  }
  return `The server answered ${answer.status} ${answer.statusText}.`;
}

export async function getJson(path) {
  return (await request(path)).json();
}

/** method: POST, PATCH, PUT or DELETE; returns what the server sent, null for nothing. */
export async function send(method, path, body = {}) {
  const answer = await request(path, { method, body });
  return answer.status === 204 ? null : answer.json();
}

/** Fire and forget, also while the page is closing. */
export function sendLast(method, path) {
  const key = sessionStorage.getItem(KEY);
  const headers = { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  fetch(path, { method, headers, body: "{}", keepalive: true }).catch(() => {});
}

/** The events of an answer as they come. Problem "gone" if the stream breaks before its last event. */
export async function* answers(chat, body, signal) {
  const answer = await request(`/api/chats/${chat}/answers`, { method: "POST", body, signal });
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    let part;
    try {
      part = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      part = { done: true };
    }
    if (part.done) {
      report(false);
      throw new Problem("The connection broke in the middle of the answer. " + GONE, "gone");
    }
    text += part.value.replaceAll("\r\n", "\n");
    for (let end; (end = text.indexOf("\n\n")) >= 0; text = text.slice(end + 2)) {
      const data = text.slice(0, end).split("\n").filter((line) => line.startsWith("data:"));
      if (!data.length) continue;
      const event = JSON.parse(data.map((line) => line.slice(5)).join("\n"));
      if (event.type === "done") reader.read().catch(() => {}); // take the end of the stream, else it counts as broken
      yield event;
      if (event.type === "done") return;
    }
  }
}

/** Save an export as a file. A fetch, since a link would not carry the key. */
export async function download(chat, format) {
  const answer = await request(`/api/chats/${chat}/export?format=${format}`);
  const named = /filename\*=utf-8''([^;]+)/i.exec(answer.headers.get("Content-Disposition") ?? "");
  const plain = /filename="?([^";]+)/i.exec(answer.headers.get("Content-Disposition") ?? "");
  const ending = { markdown: "md", json: "json", messages: "jsonl" }[format];
  const url = URL.createObjectURL(await answer.blob());
  const name = named ? decodeURIComponent(named[1]) : plain ? plain[1] : `chat.${ending}`;
  h("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

let asking = null;

/** Ask for the key once, however many requests wait for it; true if one was given. */
function askKey(wrong) {
  asking ??= new Promise((resolve) => {
    const field = h("input", { type: "password", id: "key", autocomplete: "off", required: true });
    const form = h("form", { method: "dialog", class: "stack" },
      h("h2", {}, "This server asks for a key"),
      h("p", { class: "muted" }, wrong ? "That key was not right. " : "", "It is the one that athanor serve was started with. It is kept until this tab closes."),
      h("label", { for: "key" }, "Key"), field,
      h("div", { class: "end" }, h("button", { class: "primary" }, "Go on")));
    const dialog = openDialog("Key of the server", "box", form);
    dialog.addEventListener("close", () => {
      asking = null;
      const key = field.value.replace(/[^!-~]/g, ""); // what a header can carry; a key has nothing else
      if (key) sessionStorage.setItem(KEY, key);
      resolve(Boolean(field.value));
    });
  });
  return asking;
}
