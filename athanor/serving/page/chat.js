// The conversation: opening, asking, answering again, stopping, picking. Shows nothing itself (thread.js does).

import { answers, getJson, Problem, send } from "./api.js";
import { announce, toast } from "./dom.js";
import { draft, moveDraft, setDraft } from "./drafts.js";
import { changed, chosenModels, emptyChat, loadModels, modelOf, patchChat, remember, state } from "./state.js";
import { newestUnder, pathTo, variants, withMessage } from "./tree.js";

const WARM = 0.7; // a temperature for another answer, where the chat's own is 0

let leaving = false;
addEventListener("pagehide", () => (leaving = true));
addEventListener("pageshow", () => (leaving = false));

/** Show the chat of this id; null is a new one. */
export async function openChat(id) {
  state.view = "chat";
  state.editing = null;
  state.opening = null;
  if (id === null) {
    if (state.chat.id !== null) state.chat = { ...emptyChat(), models: chosenModels() };
  } else if (state.lives.has(id)) {
    state.chat = state.lives.get(id).chat;
  } else if (state.chat.id !== id || state.chat.unread) {
    state.opening = id;
    if (state.chat.unread) {
      state.chat = emptyChat(id);
      changed("view", "thread", "composer");
    }
    const chat = await getJson(`/api/chats/${id}`);
    if (state.opening !== id) return; // another one was asked for meanwhile
    state.opening = null;
    state.chat = chat;
  }
  changed("view", "chat", "models", "thread", "composer", "chats");
  if (id === null) changed("fresh");
}

export const live = () => state.lives.get(state.chat.id) ?? null;

/** A new question at the end of the conversation; its text goes back to the composer if it cannot be answered. */
export function ask(text) {
  return question(text, null);
}

/** A question in other words, as a variant of `message`. */
export function askAnew(message, text) {
  return question(text, message);
}

async function question(text, instead) {
  const { chat } = state;
  const giveBack = (id) => {
    if (instead) state.editing = { id: instead.id, text };
    else setDraft(id, [text, draft(id)].filter(Boolean).join("\n\n")); // what was typed meanwhile stays, too
  };
  state.editing = null;
  const request = { content: text, parent: instead ? instead.parent : chat.leaf };
  return run(chat, request, chosenModels(), () => giveBack(chat.id));
}

/** Another answer to the same question; of both models while two are compared. `own`: settings of this answer alone. */
export async function answerAgain(message, own = {}) {
  const { chat } = state;
  const sampling = { ...chat.sampling, ...own };
  // The seed of the chat would bring the same answer again.
  if (sampling.seed !== undefined) sampling.seed = (sampling.seed + variants(chat, message).length) % 2 ** 32;
  const before = message.content;
  const compared = chosenModels().length === 2;
  const models = compared ? chosenModels() : [chosenModels()[0] ?? message.model];
  await run(chat, { user: message.parent, sampling }, models, () => {});
  const now = chat.messages.find((other) => other.id === chat.leaf);
  const heat = sampling.temperature ?? modelOf(message.model)?.defaults?.temperature;
  if (!compared && !heat && now && now.id !== message.id && now.model === message.model && now.content === before) {
    toast("The same answer again: at temperature 0 there is only one.", { label: `Another at ${WARM}`,
      run: () => answerAgain(now, { temperature: WARM }) });
  }
}

/** More of an answer that was cut or stopped, in the same place. */
export function goOn(message) {
  const model = modelOf(message.model) ? message.model : chosenModels()[0];
  return run(state.chat, { user: message.parent, begun: message.id }, [model], () => {});
}

/** Send a request again that failed. */
export async function retry(problem) {
  const { chat } = state;
  state.problems.delete(chat.id);
  const models = problem.request.begun === undefined ? chosenModels() : chosenModels().slice(0, 1);
  if (problem.request.user !== undefined) return run(chat, problem.request, models, () => {});
  const text = problem.request.content;
  // It was given back to where it came from; what else stands there is not part of it.
  const typed = draft(chat.id);
  if (typed === text || typed.startsWith(`${text}\n\n`)) setDraft(chat.id, typed.slice(text.length).trimStart());
  if (state.editing?.text === text) state.editing = null;
  changed("composer");
  const giveBack = () => setDraft(chat.id, [text, draft(chat.id)].filter(Boolean).join("\n\n"));
  return run(chat, { ...problem.request }, chosenModels(), giveBack);
}

/** Store a new chat; returns what was set meanwhile, which the server does not know yet. */
async function store(chat) {
  const { system, sampling } = chat;
  const before = { system, sampling, models: chat.models };
  const models = chosenModels();
  const stored = await send("POST", "/api/chats", { system, sampling, models });
  const since = Object.fromEntries(Object.keys(before).filter((name) => chat[name] !== before[name]).map((name) => [name, chat[name]]));
  Object.assign(chat, stored, { sampling, models }, since);
  if (state.chat === chat) {
    moveDraft(null, chat.id);
    history.replaceState(null, "", `#/chat/${chat.id}`);
  }
  return since;
}

/** Before a question: the chat must be in the server, and known as the server has it. */
async function prepare(now) {
  const { chat, request } = now;
  if (chat.id === null) {
    const since = await store(chat);
    state.lives.delete(null);
    state.lives.set(chat.id, now);
    if (Object.keys(since).length) await patchChat(since, chat);
  } else if (chat.stale) {
    const before = chat.leaf;
    Object.assign(chat, await getJson(`/api/chats/${chat.id}`), { stale: false });
    if (request.parent === before) request.parent = chat.leaf;
  }
  now.before = null;
}

/** After a time without contact: the shown chat as the server has it, which others may have gone on with. */
export async function catchUp() {
  const { chat } = state;
  if (chat.id === null || chat.unread || live()) return;
  const known = chat.messages.length;
  const stored = await getJson(`/api/chats/${chat.id}`);
  if (state.lives.has(chat.id)) return;
  Object.assign(chat, stored, { stale: false });
  if (chat.messages.length > known) { // what broke off is among them
    chat.broken = null;
    const asked = chat.messages.findLast((message) => message.role === "user").content;
    if (draft(chat.id) === asked) setDraft(chat.id, "");
  }
  if (!chat.broken && state.problems.get(chat.id)?.kind === "gone") state.problems.delete(chat.id);
  changed("chat", "models", "thread", "composer");
}

function fail(chat, error, giveBack, request = null) {
  giveBack();
  const text = error instanceof Problem ? error.message : `Something went wrong on this page: ${error.message}`;
  state.problems.set(chat.id, { text, kind: error.kind ?? "page", request });
  announce(text);
  changed("thread", "composer");
  return false;
}

async function run(chat, request, models, giveBack) {
  if (!models.length || state.lives.has(chat.id)) return giveBack(), changed("thread", "composer"), false;
  const text = chat.messages.find((message) => message.id === request.begun)?.content ?? "";
  const slots = models.map((model) => ({ model, text, tokens: 0, phase: "waiting", message: null, forgotten: 0 }));
  // What broke off before stays in view until the chat is known as the server has it.
  const now = { chat, request, slots, aborter: new AbortController(), stopping: false, before: chat.broken };
  state.lives.set(chat.id, now);
  state.problems.delete(chat.id);
  chat.broken = null;
  remember("model", models[0]);
  announce("Answering");
  changed("asked", "thread", "composer", "chats");
  let problem = null;
  try {
    await prepare(now);
    const body = { sampling: chat.sampling, ...request, models };
    for await (const event of answers(chat.id, body, now.aborter.signal)) take(now, event);
  } catch (error) {
    problem = error;
  }
  state.lives.delete(chat.id);
  return finish(now, problem, giveBack);
}

function take(now, event) {
  const slot = now.slots[event.slot];
  if (event.type === "text") {
    slot.text += event.text;
    slot.tokens = event.tokens;
    if (slot.phase === "writing") return slot.show?.();
    slot.phase = "writing";
  } else if (event.type === "loading") {
    slot.phase = "loading";
    loadModels().catch(() => {});
  } else if (event.type === "start") {
    slot.phase = "thinking";
    slot.forgotten = event.forgotten;
  } else if (event.type === "end") {
    slot.phase = "done";
    slot.message = event.message ?? null;
  } else if (event.type === "error") {
    slot.phase = "failed";
    slot.problem = { text: event.message, kind: event.kind };
  } else if (event.type === "done") {
    now.done = event;
  }
  if (state.chat === now.chat) changed("thread");
}

function finish(now, problem, giveBack) {
  const { chat, slots, done } = now;
  if (done) {
    const stored = [done.user, ...slots.map((slot) => slot.message)].filter(Boolean);
    for (const message of stored) chat.messages = withMessage(chat, message).messages;
    chat.leaf = done.leaf ?? chat.leaf;
    announce(slots.map((slot) => slot.message?.content ?? "").join(" "));
  } else {
    // What was said stays in view; what the server kept of it is read before the next question.
    chat.stale = chat.id !== null;
    chat.broken = slots.some((slot) => slot.text) ? now : now.before;
  }
  loadModels().catch(() => {});
  changed("answered");
  const failed = slots.filter((slot) => slot.problem);
  // Who reloads the page stops the answer, and the server keeps what was said with its question.
  const kept = leaving && slots.some((slot) => slot.text);
  const lost = now.request.content !== undefined && !done?.user && !kept;
  if (problem?.name === "AbortError") problem = null;
  if (!problem && failed.length) {
    const several = slots.length > 1;
    const text = failed.map((slot) => (several ? `${slot.model}: ` : "") + slot.problem.text).join("\n");
    problem = new Problem(text, failed[0].problem.kind);
  }
  if (problem) return fail(chat, problem, lost ? giveBack : () => {}, now.request);
  if (lost) giveBack();
  changed("thread", "composer", "chats");
  return true;
}

/** End the answer that is being made; what was said stays. */
export async function stop() {
  const now = live();
  if (!now || now.stopping) return;
  now.stopping = true;
  try {
    if (now.chat.id === null) return now.aborter.abort();
    await send("POST", `/api/chats/${now.chat.id}/stop`);
  } catch {
    now.aborter.abort();
  }
}

/** Show another variant of `message`: `step` 1 is the next, -1 the one before. */
export async function flip(message, step) {
  const { chat } = state;
  const all = variants(chat, message);
  const other = all[all.findIndex((one) => one.id === message.id) + step];
  if (other) await go(newestUnder(chat, other).id);
}

async function go(leaf, more = {}) {
  Object.assign(state.chat, { leaf });
  changed("thread");
  await tell(() => patchChat({ leaf, ...more }));
}

/** Go on with one answer of a comparison, and with its model. */
export async function pick(message) {
  remember("model", message.model);
  await go(message.id, { models: [message.model] });
  changed("thread", "composer", "picked");
}

/** Keep a verdict, and maybe what the answer should have been. True if the server has it. */
export async function feedback(message, verdict, correction = null) {
  const { chat } = state;
  return tell(async () => {
    const stored = await send("PUT", `/api/messages/${message.id}/feedback`, { verdict, correction });
    chat.messages = withMessage(chat, stored).messages;
    changed("thread");
  });
}

/** Run something that talks to the server; a failure becomes a note. True if it worked. */
export async function tell(action) {
  try {
    await action();
    return true;
  } catch (error) {
    toast(error.message, null, 8);
    return false;
  }
}

export const shownPath = () => pathTo(state.chat, state.chat.leaf);
