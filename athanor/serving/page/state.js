// What the page knows, in one place. `changed(what)` tells the parts that show it.

import { getJson } from "./api.js";
import { update } from "./chats.js";

export const state = {
  models: [],
  defaultModel: null,
  retraining: null, // {state, text} where the page may start one
  known: false, // whether the server has told its models yet
  chats: [],
  chat: emptyChat(addressed()), // the shown one
  view: "chat", // or "corrections"
  lives: new Map(), // chat id -> answer that is being made (chat.js)
  problems: new Map(), // chat id or null -> what went wrong last
};

/** Id of the chat that the address names; null is a new one. */
export function addressed() {
  return /^#\/chat\/(\w+)$/.exec(location.hash)?.[1] ?? null;
}

const listeners = new Map();

export function on(what, listener) {
  listeners.set(what, [...(listeners.get(what) ?? []), listener]);
}

export function changed(...names) {
  for (const name of names) for (const listener of listeners.get(name) ?? []) listener();
}

/** A new chat, not kept yet; with an id one of which nothing else is known yet, so that nothing can be done to it. */
export function emptyChat(id = null) {
  return { id, unread: id !== null, title: "", system: "", models: [], sampling: {}, leaf: null, messages: [] };
}

/** Something remembered in this browser, or in `place`; lost without harm where storage is off. */
export function remember(name, value, place = "localStorage") {
  try {
    if (value) window[place].setItem(`athanor-${name}`, value);
    else window[place].removeItem(`athanor-${name}`);
  } catch {
    // Private windows may refuse.
  }
}

export function recall(name, place = "localStorage") {
  try {
    return window[place].getItem(`athanor-${name}`);
  } catch {
    return null;
  }
}

export const modelOf = (id) => state.models.find((model) => model.id === id) ?? null;

/** Whether a model continues a text: nobody has taught it to answer. */
export const continues = (id) => modelOf(id)?.template === "none";

/** The models the next question goes to: those of the chat that exist, else the last used one, else the newest. */
export function chosenModels() {
  if (state.chat.unread) return [];
  const known = state.chat.models.filter(modelOf);
  if (known.length) return known;
  const last = recall("model");
  return [modelOf(last) && modelOf(last).state !== "failed" ? last : state.defaultModel].filter(Boolean);
}

let waiting = null;
const SOON_MS = 2000; // until the server is asked again

export async function loadModels() {
  const told = await getJson("/api/state");
  state.models = told.models;
  state.defaultModel = told.default_model;
  const before = state.retraining?.state;
  state.retraining = told.retraining;
  if (before === "running" && told.retraining?.state !== before) changed("retrained");
  state.known = true;
  changed("models", "retraining");
  clearTimeout(waiting);
  const soon = state.view === "corrections" || [told.retraining, ...told.models].some((one) => /loading|running/.test(one?.state));
  if (soon) waiting = setTimeout(() => loadModels().catch(() => {}), SOON_MS);
}

/** Change a chat, also as it is kept once it has been asked something. */
export async function patchChat(values, chat = state.chat) {
  Object.assign(chat, values);
  changed("chat", "models");
  if (chat.id !== null) await update(chat.id, values, [], chat);
}
