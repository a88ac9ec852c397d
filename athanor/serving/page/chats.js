// The chats of this browser, in IndexedDB: their list and search, their trees of messages, files to save and to load.

import { getJson, send } from "./api.js";
import { h } from "./dom.js";
import { fenced } from "./markdown.js";
import { byAge, pathTo } from "./tree.js";
import { openDB } from "./vendor/idb.js";

const TITLE_CHARS = 50;
const TELLING_CHARS = 16; // a shorter question may be a greeting: "How are you?"; one with a digit is none
const SNIPPET_CHARS = 160;
export const UNDO_SECONDS = 6;

/** Other tabs get the id of a chat that has changed here, null for a file of them. */
export const elsewhere = new BroadcastChannel("athanor-chats");

let database = null;

function open() {
  database ??= openDB("athanor", 1, {
    upgrade(db) {
      db.createObjectStore("chats", { keyPath: "id" });
      db.createObjectStore("messages", { keyPath: ["chat", "id"] });
    },
    blocking: (old, next, { target }) => target.close(), // a newer page in another tab waits for it
    terminated: () => (database = null),
  }).catch((error) => {
    database = null;
    throw new Error(`This browser keeps no chats (${error.message}). Allow it to store data for this site.`);
  });
  return database;
}

// randomUUID is missing where the page comes by plain http from another machine.
export const newId = () => crypto.getRandomValues(new Uint32Array(4)).reduce((id, part) => id + part.toString(36), "");

let last = 0;
/** A time stamp, later than each one before. */
export const stamp = () => new Date((last = Math.max(Date.now(), last + 1))).toISOString();

const rangeOf = (id) => IDBKeyRange.bound([id], [id, []]);

async function write(id, action) {
  const tx = (await open()).transaction(["chats", "messages"], "readwrite");
  await Promise.all([action(tx.objectStore("chats"), tx.objectStore("messages")), tx.done]);
  elsewhere.postMessage(id);
}

const unsaved = new Map(); // by id: to write whole

export function create(chat) {
  navigator.storage?.persist?.();
  unsaved.set(chat.id, chat);
  return update(chat.id, {});
}

/** Change a chat, and add or replace messages; does nothing if it was deleted meanwhile. `chat`: what the page has of it. */
export async function update(id, values, added = [], chat) {
  const { messages: known = [], unread, ...fields } = unsaved.get(id) ?? {};
  if (Object.keys(values).some((name) => name !== "leaf")) values = { updated_at: stamp(), ...values };
  try {
    await write(id, async (chats, messages) => {
      const row = await chats.get(id) ?? fields;
      if (row.id) await Promise.all([chats.put({ ...row, ...fields, deleted: row.deleted, ...values }), ...[...known, ...added].map((message) => messages.put({ ...message, chat: id }))]);
    });
    unsaved.delete(id);
  } catch (error) {
    if (chat) unsaved.set(id, chat);
    throw error;
  }
}

/** A chat with its messages, oldest first; null for one that is not here. */
export async function read(id) {
  if (unsaved.has(id)) return unsaved.get(id);
  const db = await open();
  const [chat, messages] = await Promise.all([db.get("chats", id), db.getAll("messages", rangeOf(id))]);
  return chat && !chat.deleted ? { ...chat, messages: messages.sort(byAge) } : null;
}

/** Chats with messages, newest first; with a query those that have each of its words, and a snippet. */
export async function list(query = "") {
  const db = await open();
  const chats = (await db.getAll("chats")).filter((chat) => chat.leaf && !chat.deleted)
    .sort((a, b) => (a.updated_at < b.updated_at ? 1 : -1));
  const words = [...new Set(fold(query).split(/\s+/))].filter(Boolean);
  if (!words.length) return chats;
  const messages = (await db.getAll("messages")).sort(byAge).map(({ chat, content }) => {
    const folded = fold(content);
    return { chat, content, folded, hits: words.filter((word) => folded.includes(word)) };
  }).filter(({ hits }) => hits.length);
  return chats.flatMap((chat) => {
    const own = messages.filter((message) => message.chat === chat.id);
    const title = fold(chat.title);
    if (!words.every((word) => title.includes(word) || own.some(({ hits }) => hits.includes(word)))) return [];
    const best = own.sort((a, b) => b.hits.length - a.hits.length)[0];
    return [{ ...chat, snippet: best && snippet(best) }];
  });
}

/** Remove what was deleted and is past undoing, and chats whose first question failed a day ago. */
export async function purge() {
  const db = await open();
  const gone = ({ deleted, leaf, updated_at }) => deleted ? deleted < Date.now() - UNDO_SECONDS * 1000
    : !leaf && Date.parse(updated_at) < Date.now() - 86_400_000;
  for (const { id } of (await db.getAll("chats")).filter(gone)) {
    const messages = await db.getAll("messages", rangeOf(id));
    // Without the server, later.
    if (messages.some((message) => message.feedback)) await send("DELETE", `/api/feedback?chat=${id}`);
    await write(id, (chats, stored) => Promise.all([chats.delete(id), stored.delete(rangeOf(id))]));
  }
}

/** As texts are compared: no case, no accents, one spelling of each character. */
const fold = (text) => text.normalize("NFKD").toUpperCase().toLowerCase().replaceAll("ς", "σ").normalize("NFKD").replace(/[\u0300-\u036f]/g, "");

function snippet({ content, folded, hits }) {
  const first = Math.min(...hits.map((word) => folded.indexOf(word)));
  const at = Math.round(first * content.length / folded.length); // folding changes lengths
  const start = Math.max(0, Math.min(at - SNIPPET_CHARS / 2, content.length - SNIPPET_CHARS));
  const end = start + SNIPPET_CHARS;
  const part = content.slice(start, end).trim().replace(/\s+/g, " ");
  return (start ? part.replace(/^\S{1,20} |^/, "…") : part) + (end < content.length ? "…" : ""); // from a whole word on
}

/** A title from the first questions: the first that is more than a greeting, else the longest. */
export function titleFrom(messages) {
  const lines = messages.filter(({ role }) => role === "user").slice(0, 8).map(({ content }) => content.trim().replace(/\s+/g, " "));
  const line = lines.find((one) => one.length >= TELLING_CHARS || /\d/.test(one)) ?? lines.reduce((a, b) => (b.length > a.length ? b : a), "");
  if (line.length <= TITLE_CHARS) return line;
  const cut = [...line].slice(0, TITLE_CHARS - 1).join("");
  const space = cut.lastIndexOf(" ");
  return `${(space > TITLE_CHARS / 2 ? cut.slice(0, space) : cut).replace(/[ ,.;:-]+$/, "")}…`;
}

// Files

const corrected = ({ feedback }) => (feedback?.status === "rejected" ? "" : feedback?.correction);

function markdown({ title, system, messages }) {
  const blocks = [`# ${title || "Chat"}`, ...system ? ["## System", system] : []];
  for (const message of messages) {
    blocks.push(...message.role === "user" ? ["## Question", message.content.trim()] : [`## Answer (${message.model})`, fenced(message.content)]);
    if (corrected(message)) blocks.push("### It should have said", fenced(corrected(message)));
  }
  return `${blocks.join("\n\n")}\n`;
}

/** A row of training data, with what should have been said. */
function row({ system, messages }) {
  const said = messages.map((message) => ({ role: message.role, content: corrected(message) || message.content }));
  return `${JSON.stringify({ messages: [...system ? [{ role: "system", content: system }] : [], ...said] })}\n`;
}

const written = (value) => `${JSON.stringify(value, null, 2)}\n`;

function download(name, text) {
  const url = URL.createObjectURL(new Blob([text]));
  h("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

/** Save the shown conversation as a file (markdown, messages), or all of the chat (json). */
export async function exportChat(id, format) {
  const chat = await read(id);
  if (chat.messages.some((message) => message.feedback?.correction)) {
    // The commands accept and reject, too.
    const { corrections } = await getJson("/api/corrections").catch(() => ({ corrections: [] }));
    for (const { id, feedback } of chat.messages) {
      const now = corrections.find(({ message }) => message === id);
      if (now && feedback) feedback.status = now.status;
    }
  }
  const shown = { ...chat, messages: pathTo(chat, chat.leaf) };
  const [ending, text] = { markdown: ["md", markdown(shown)], json: ["json", written(chat)], messages: ["jsonl", row(shown)] }[format];
  const words = chat.title.normalize("NFC").match(/[\p{L}\p{N}]+/gu) ?? [];
  download(`${[...["chat", ...words].join("-")].slice(0, 60).join("").replace(/-$/, "")}.${ending}`, text);
}

export async function exportAll() {
  const chats = await Promise.all((await list()).map(({ id }) => read(id)));
  download("chats.json", written(chats));
}

/** Add the chats of such a file; what is here already stays. Returns how many it has. */
export async function importChats(text) {
  const found = [JSON.parse(text)].flat().map(checked);
  for (const { messages: added, ...chat } of found) {
    await write(null, async (chats, messages) => {
      const [old, known] = await Promise.all([chats.get(chat.id), messages.getAllKeys(rangeOf(chat.id))]);
      const ids = known.map(([, id]) => id);
      await Promise.all([chats.put({ ...chat, ...old, deleted: null }),
        ...added.filter(({ id }) => !ids.includes(id)).map((message) => messages.put({ ...message, chat: chat.id }))]);
    });
  }
  return found.length;
}

/** A chat of a file, with the fields known here; throws for what is none. */
function checked({ id, title, system, models, sampling, leaf, created_at, updated_at, messages }) {
  const kept = new Map();
  const under = (above) => messages.filter(({ parent }) => parent === above);
  const ordered = under(null); // parents first: a clock that was set back gave an answer an earlier time
  for (const { id, parent, role, content, model, created_at, stats, feedback } of ordered) {
    const above = kept.get(parent)?.role ?? "assistant";
    if (kept.has(id) || above !== { user: "assistant", assistant: "user" }[role] || typeof content !== "string") throw new Error(`Message ${id} does not follow another one.`);
    kept.set(id, { id, parent, role, content, model, created_at: created_at ?? stamp(), stats, feedback });
    ordered.push(...under(id));
  }
  if (!/^\w{1,64}$/.test(id) || !kept.size || kept.size < messages.length) throw new Error("That is no chat of this page.");
  return { id, title: String(title ?? ""), system: String(system ?? ""), models: models ?? [], sampling: sampling ?? {},
    leaf: kept.has(leaf) ? leaf : [...kept.keys()].at(-1), created_at: created_at ?? stamp(), updated_at: updated_at ?? stamp(), messages: [...kept.values()] };
}
