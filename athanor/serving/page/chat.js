// The conversation: opening, asking, answering again, stopping, picking. Shows nothing itself (thread.js does).

import { answers, Problem, send } from "./api.js";
import * as chats from "./chats.js";
import { announce, toast } from "./dom.js";
import { draft, setDraft } from "./drafts.js";
import { addressed, changed, chosenModels, emptyChat, loadModels, modelOf, patchChat, remember, state } from "./state.js";
import { newestUnder, pathTo, put, variants } from "./tree.js";

const WARM = 0.7; // a temperature for another answer, where the chat's own is 0
const SAVE_MS = 500; // between two savings of an answer that grows

addEventListener("pagehide", () => state.lives.forEach((now) => save(now)));

/** Show the chat of this id, null for a new one; false if there is none. */
export async function openChat(id) {
  state.view = "chat";
  state.editing = null;
  if (id === null) {
    if (state.chat.id !== null) state.chat = { ...emptyChat(), models: chosenModels() };
  } else if (state.lives.has(id)) {
    state.chat = state.lives.get(id).chat;
  } else if (state.chat.id !== id || state.chat.unread) {
    const chat = await chats.read(id);
    if (addressed() !== id) return true; // another one was asked for meanwhile
    if (!chat) return false;
    state.chat = chat;
  }
  changed("view", "chat", "models", "thread", "composer", "chats");
  if (id === null) changed("fresh");
  return true;
}

/** Another tab has changed the shown chat; false if it has deleted it. */
export async function reread() {
  const { chat } = state;
  if (chat.id === null || chat.unread || live()) return true;
  const stored = await chats.read(chat.id);
  if (state.chat !== chat || live()) return true;
  if (stored) Object.assign(chat, stored);
  changed("chat", "models", "thread");
  return Boolean(stored);
}

export const live = () => state.lives.get(state.chat.id) ?? null;

/** A new question, or another wording of `instead`; given back if it cannot be answered. */
export function ask(text, instead = null) {
  const { chat } = state;
  state.editing = null;
  return run(chat, { content: text, parent: instead ? instead.parent : chat.leaf }, chosenModels(), () => {
    if (instead) state.editing = { id: instead.id, text };
    else putBack(chat, text);
  });
}

/** What was typed meanwhile stays, too. */
const putBack = ({ id }, text) => setDraft(id, [text, draft(id)].filter(Boolean).join("\n\n"));

/** Another answer to the same question; of both models while two are compared. `own`: settings of this answer alone. */
export async function answerAgain(message, own = {}) {
  const { chat } = state;
  const sampling = { ...chat.sampling, ...own };
  // The seed of the chat would bring the same answer again.
  if (sampling.seed !== undefined) sampling.seed = (sampling.seed + variants(chat, message).length) % 2 ** 32;
  const before = message.content;
  const compared = chosenModels().length === 2;
  const models = compared ? chosenModels() : [chosenModels()[0] ?? message.model];
  await run(chat, { user: message.parent, sampling }, models);
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
  return run(state.chat, { user: message.parent, begun: message.id }, [model]);
}

/** Send a request again that failed; an answer that was begun is continued. */
export async function retry({ request, models }) {
  const { chat } = state;
  state.problems.delete(chat.id);
  if (request.user !== undefined) return run(chat, request, models ?? chosenModels().slice(0, request.begun ? 1 : 2));
  const text = request.content;
  // It was given back to where it came from; what else stands there is not part of it.
  const typed = draft(chat.id);
  if (`${typed}\n\n`.startsWith(`${text}\n\n`)) setDraft(chat.id, typed.slice(text.length).trimStart());
  if (state.editing?.text === text) state.editing = null;
  changed("composer");
  return run(chat, request, chosenModels(), () => putBack(chat, text));
}

/** Give a new chat its id, and its place in the address. */
function begin(chat) {
  const now = chats.stamp();
  Object.assign(chat, { id: chats.newId(), created_at: now, updated_at: now, models: chosenModels() });
  history.replaceState(null, "", `#/chat/${chat.id}`);
  tell(() => chats.create(chat));
}

/** What a model reads: the system prompt, the messages up to `id`, and `more`. */
function promptOf({ system, messages }, id, ...more) {
  return [system && { role: "system", content: system }, ...pathTo({ messages }, id), ...more].filter(Boolean).map(({ role, content }) => ({ role, content }));
}

async function run(chat, request, models, giveBack = () => {}) {
  if (!models.length || state.lives.has(chat.id)) return giveBack(), changed("thread", "composer"), false;
  if (chat.id === null) begin(chat);
  const begun = chat.messages.find((message) => message.id === request.begun);
  const before = begun?.content.replace(/\ufffd+$/, "") ?? ""; // a character that was cut comes whole
  const user = chat.messages.find((message) => message.id === request.user)
    ?? { id: chats.newId(), parent: request.parent, role: "user", content: request.content, created_at: chats.stamp() };
  const slots = models.map((model) => ({ model, text: before, phase: "waiting", message: null, likely: [], stats: {},
    started: performance.now(), id: chats.newId(), created_at: chats.stamp() }));
  const now = { chat, request, user, begun, before, slots, aborter: new AbortController(), saved: 0 };
  state.lives.set(chat.id, now);
  state.problems.delete(chat.id);
  remember("model", models[0]);
  announce("Answering");
  changed("asked", "thread", "composer", "chats");
  const messages = promptOf(chat, user.parent, user, begun && { role: "assistant", content: before });
  const body = { models, messages, sampling: request.sampling ?? chat.sampling };
  let problem = null;
  try {
    for await (const event of answers(body, now.aborter.signal)) take(now, event);
  } catch (error) {
    problem = error;
  }
  return finish(now, problem, giveBack);
}

function take(now, { slot: at, type, text = "", logprobs = [], kind, message, ...stats }) {
  const slot = now.slots[at];
  const growing = type === "text" && slot.phase === "writing";
  slot.phase = { text: "writing", loading: "loading" }[type] ?? "";
  slot.text += text;
  Object.assign(slot.stats, stats);
  for (const row of logprobs) {
    const [own, ...top] = [row, ...row.top_logprobs].map(({ token, logprob }) => [token, Number(Math.exp(logprob).toFixed(4))]);
    slot.likely.push([...own, top]);
  }
  if (type === "loading") loadModels().catch(() => {});
  if (type === "start") slot.started = performance.now();
  if (type === "text" && performance.now() - now.saved > SAVE_MS) tell(() => save(now));
  if (type === "end") slot.message = answerOf(now, slot);
  if (type === "error") slot.problem = { text: message, kind };
  if (growing) slot.show?.();
  else if (state.chat === now.chat) changed("thread");
}

/** An answer so far, as a message; null while there is nothing of it. Counts are those of all its parts. */
function answerOf({ user, begun, before }, slot) {
  const { tokens = 0, seconds = (performance.now() - slot.started) / 1000, reason = "stopped" } = slot.stats;
  if (reason === "stopped" && slot.text === before) return null;
  const old = begun?.stats ?? {};
  const stats = { ...slot.stats, reason, tokens: tokens + (old.tokens ?? 0), seconds: Number((seconds + (old.seconds ?? 0)).toFixed(3)) };
  // Of a beginning they may not be known.
  if (slot.likely.length) stats.likely = [...old.likely ?? (before ? [[before, null, []]] : []), ...slot.likely];
  return { id: slot.id, parent: user.id, role: "assistant", model: slot.model, created_at: slot.created_at, ...begun, content: slot.text, stats };
}

/** What there is of a turn as messages: the question only with an answer. */
function messagesOf(now) {
  const said = now.slots.map((slot) => answerOf(now, slot)).filter(Boolean);
  return said.length ? [now.user, ...said] : [];
}

function save(now) {
  const { chat, user } = now;
  const messages = messagesOf(now);
  if (!messages.length) return null;
  if (!now.saved && (!chat.title || chat.title === chats.titleFrom(chat.messages))) { // else it was given by hand
    chat.title = chats.titleFrom([...chat.messages, user]);
  }
  now.saved = performance.now();
  return chats.update(chat.id, { leaf: messages[1].id, title: chat.title }, messages, chat);
}

async function finish(now, problem, giveBack) {
  const { chat, slots, request, user } = now;
  await tell(() => save(now));
  state.lives.delete(chat.id);
  const [, ...said] = messagesOf(now);
  if (said.length) {
    put(chat, user, ...said);
    chat.leaf = said[0].id;
    announce(said.map(({ content }) => content).join(" "));
  } else if (request.content !== undefined) {
    giveBack();
  }
  loadModels().catch(() => {});
  changed("answered");
  const failed = slots.filter((slot) => slot.problem);
  if (problem?.name === "AbortError") problem = null;
  if (!problem && failed.length) {
    const text = failed.map((slot) => (slots.length > 1 ? `${slot.model}: ` : "") + slot.problem.text).join("\n");
    problem = new Problem(text, failed[0].problem.kind);
  }
  if (problem) {
    now.aborter.abort();
    const text = problem.kind ? problem.message : `Something went wrong on this page: ${problem.message}`;
    const rest = { user: user.id, sampling: request.sampling, begun: slots.length === 1 ? said[0]?.id : undefined };
    state.problems.set(chat.id, { text, kind: problem.kind ?? "page", request: said.length ? rest : request,
      models: said.length && failed.length === 1 && slots.length === 2 ? [failed[0].model] : null });
    announce(text);
  }
  changed("thread", "composer", "chats");
  return !problem;
}

/** End the answer that is being made; what was said stays. */
export const stop = () => live()?.aborter.abort();

/** Show another variant of `message`: `step` 1 is the next, -1 the one before. */
export function flip(message, step) {
  const { chat } = state;
  const all = variants(chat, message);
  const other = all[all.findIndex((one) => one.id === message.id) + step];
  if (other) go(newestUnder(chat, other).id);
}

function go(leaf, more) {
  tell(() => patchChat({ leaf, ...more }));
  changed("thread", "composer");
}

/** Go on with one answer of a comparison, and with its model. */
export function pick(message) {
  remember("model", message.model);
  go(message.id, { models: [message.model] });
}

/** Keep a verdict, and maybe what the answer should have been. True if the server has it. */
export function feedback(message, verdict, correction = null) {
  const { chat } = state;
  return tell(async () => {
    const { id, parent, model, content } = message;
    const row = await send("PUT", "/api/feedback", { chat: chat.id, title: chat.title, message: id, parent, model, answer: content, verdict, correction,
      path: pathTo(chat, parent).map((one) => one.id), prompt: promptOf(chat, parent) });
    const judged = { ...chat.messages.find((one) => one.id === id), feedback: { verdict, correction: row.correction, status: row.status } };
    put(chat, judged);
    changed("thread");
    await chats.update(chat.id, {}, [judged], chat);
  });
}

/** Run something that can fail; a failure becomes a note. True if it worked. */
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
