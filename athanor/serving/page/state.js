// What the page knows, in one place. `changed(what)` tells the parts that show it.

import { getJson, send } from "./api.js";

export const state = {
  models: [],
  defaultModel: null,
  known: false, // whether the server has told its models yet
  chats: [],
  chat: emptyChat(), // the shown one; id null: not stored yet
  view: "chat", // or "corrections"
  lives: new Map(), // chat id -> answer that is being made (chat.js)
  problems: new Map(), // chat id or null -> what went wrong last
};

const listeners = new Map();

export function on(what, listener) {
  listeners.set(what, [...(listeners.get(what) ?? []), listener]);
}

export function changed(...names) {
  for (const name of names) for (const listener of listeners.get(name) ?? []) listener();
}

export function emptyChat() {
  return { id: null, title: "", system: "", models: [], sampling: {}, leaf: null, messages: [] };
}

/** Something remembered in this browser; lost without harm where storage is off. */
export function remember(name, value) {
  try {
    if (value === null) localStorage.removeItem(`athanor-${name}`);
    else localStorage.setItem(`athanor-${name}`, value);
  } catch {
    // Private windows may refuse.
  }
}

export function recall(name) {
  try {
    return localStorage.getItem(`athanor-${name}`);
  } catch {
    return null;
  }
}

export const modelOf = (id) => state.models.find((model) => model.id === id) ?? null;

/** The models the next question goes to: those of the chat that exist, else the last used one, else the newest. */
export function chosenModels() {
  const known = state.chat.models.filter(modelOf);
  if (known.length) return known;
  const last = recall("model");
  return [modelOf(last) && modelOf(last).state !== "failed" ? last : state.defaultModel].filter(Boolean);
}

let waiting = null;

export async function loadModels() {
  const told = await getJson("/api/state");
  state.models = told.models;
  state.defaultModel = told.default_model;
  state.known = true;
  changed("models");
  clearTimeout(waiting);
  if (told.models.some((model) => model.state === "loading")) {
    waiting = setTimeout(() => loadModels().catch(() => {}), 1500);
  }
}

/** Change the shown chat, in the server too once it is stored there. */
export async function patchChat(values) {
  Object.assign(state.chat, values);
  changed("chat", "models");
  const { id } = state.chat;
  if (id !== null) await send("PATCH", `/api/chats/${id}`, values);
}
