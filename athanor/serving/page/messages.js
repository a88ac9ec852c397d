// Elements of single messages and of what is around them.

import { tinted } from "./chances.js";
import { answerAgain, ask, feedback, flip, goOn, live, pick, retry } from "./chat.js";
import { copyText, counted, h, icon, iconButton, onEnter, toast } from "./dom.js";
import { Growing, render } from "./markdown.js";
import { isTraced, marked, sources, toggleTrace } from "./origins.js";
import { changed, continues, state } from "./state.js";
import { variants } from "./tree.js";

const bodies = new WeakMap(); // message -> its rendered text; a changed message is another object

function prose(message) {
  const element = marked(message) ?? (message.stats?.likely && !state.untinted ? tinted(message.stats.likely) : null);
  if (continues(message.model)) {
    const given = state.chat.messages.find((other) => other.id === message.parent)?.content ?? "";
    return continued(element ?? h("div.prose", {}, message.content), given);
  }
  if (element) return element;
  if (!bodies.has(message)) {
    bodies.set(message, h("div.prose", {}, message.content ? render(message.content) : h("p.muted", {}, "(an empty answer)")));
  }
  return bodies.get(message);
}

/** A text as the base model continues it: no Markdown, and what it began with before it. */
function continued(element, given) {
  element.classList.add("raw");
  element.prepend(h("span.given", {}, given));
  return element;
}

/** A question. message.id null: being asked. `answered`: the models whose answers show it, too, as a text's beginning. */
export function userMessage(message, answered = []) {
  if (message.id !== null && state.editing?.id === message.id) return editor(message);
  const begins = answered.length > 0 && answered.every(continues);
  const article = h("article.message.user", { "aria-label": "You" },
    !begins && h("div.bubble", {}, message.content));
  if (message.id === null) return article.append(h("div.foot", {})), article; // nothing moves when it is stored
  const edit = () => {
    state.editing = { id: message.id, text: message.content };
    changed("thread");
    document.querySelector("textarea.edit").focus();
  };
  article.append(h("div.foot", {}, arrows(message),
    iconButton("copy", "Copy the question", (event) => copyText(message.content, event.currentTarget)),
    iconButton("pen", "Edit the question", edit, { "data-key": `edit-${message.id}`, disabled: Boolean(live()) })));
  return article;
}

function editor(message) {
  const done = () => field.value.trim() && ask(field.value.trim(), message);
  const [field, cancel] = writing("editing", `edit-${message.id}`, "Cancel", { class: "edit", "aria-label": "Edit the question", rows: "3", "data-key": "editor" });
  onEnter(field, done);
  return h("article.message.user.editing", { "aria-label": "You" }, field,
    h("div.end", {}, cancel, h("button.primary", { onclick: done }, "Ask again")));
}

/** A field for the text of state[what], and a button that closes it as Escape does; `opener` has the focus then. */
function writing(what, opener, label, properties) {
  const close = () => {
    state[what] = null;
    changed("thread");
    document.querySelector(`[data-key="${opener}"]`)?.focus();
  };
  const field = h("textarea", { ...properties, value: state[what].text, oninput: () => (state[what].text = field.value),
    onkeydown: (event) => event.key === "Escape" && (event.stopPropagation(), close()) });
  return [field, h("button.plain", { onclick: close }, label)];
}

/** ‹ 2/3 › where there are other wordings or other answers. */
function arrows(message) {
  const all = variants(state.chat, message);
  if (all.length < 2) return null;
  const at = all.findIndex((one) => one.id === message.id);
  const arrow = (name, label, step) => iconButton(name, label, () => flip(message, step), {
    disabled: !all[at + step] || Boolean(live()), "data-key": `${name}-${message.role}-${message.parent}` });
  return h("div.arrows", { role: "group", "aria-label": "Variants" }, arrow("left", "Variant before", -1),
    h("span", {}, `${at + 1}/${all.length}`), arrow("right", "Next variant", 1));
}

/** A stored answer; `column` when it stands beside another one. */
export function answerMessage(message, { column = false } = {}) {
  const label = message.model;
  const { verdict } = message.feedback ?? {};
  const vote = (name, kind, text) => iconButton(name, text, () => voted(message, kind), {
    "aria-pressed": String(verdict === kind), "data-key": `${kind}-${message.id}` });
  const foot = h("div.foot", {}, column ? null : arrows(message),
    iconButton("copy", "Copy the answer", (event) => copyText(message.content, event.currentTarget)),
    // What continues a text answers nothing that could be taught.
    ...continues(message.model) ? [] : [vote("good", "up", "Good answer"), vote("bad", "down", "Bad answer")],
    column ? null : iconButton("redo", "Answer again", () => answerAgain(message), {
      "data-key": `redo-${message.parent}`, disabled: Boolean(live()) }),
    message.stats?.likely && iconButton("chart", state.untinted ? "Show probabilities" : "Show as text",
      () => ((state.untinted = !state.untinted), changed("thread")), { "data-key": `chances-${message.id}` }),
    message.content ? iconButton("book", "Where is this from?", () => toggleTrace(message), {
      "aria-pressed": String(isTraced(message)), "data-key": `trace-${message.id}` }) : null,
    stats(message, column ? null : label), !column && cut(message));
  return h("article.message.answer", { "aria-label": `Answer of ${label}`, "data-id": message.id }, column && h("div.who", {}, label),
    prose(message), foot, sources(message), state.correcting?.id === message.id && correction(message),
    column && h("button.plain.pick", { onclick: () => pick(message), disabled: Boolean(live()),
      "data-key": `pick-${message.id}`, "aria-label": `Go on with the answer of ${label}` }, "Go on with this one"));
}

function voted(message, kind) {
  const kept = message.feedback?.correction;
  const off = message.feedback?.verdict === kind && (!kept || state.correcting?.id === message.id);
  state.correcting = !off && kind === "down" ? { id: message.id, text: kept ?? message.content } : null;
  changed("thread");
  const field = document.querySelector(".better textarea");
  field?.focus();
  if (!kept) field?.select();
  if (kept && kind === "down" && !off) return; // it is open to be changed
  feedback(message, off ? null : kind);
  if (kept) toast("The correction is gone.", { label: "Undo", run: () => feedback(message, "down", kept) });
}

function correction(message) {
  const [field, cancel] = writing("correcting", `down-${message.id}`, "Not now", { id: `better-${message.id}`, rows: "4", "data-key": "better" });
  const same = () => !field.value.trim() || field.value.trim() === message.content.trim();
  field.addEventListener("input", () => (keep.disabled = same()));
  const save = async () => {
    if (!(await feedback(message, "down", field.value.trim()))) return;
    if (state.correcting?.id === message.id) cancel.click();
    toast("Kept. It waits for you under Corrections.");
  };
  const keep = h("button.primary", { onclick: save, disabled: same() }, "Keep");
  return h("div.better", {}, h("label", { for: field.id }, "What should it have said?"), field,
    h("div.end", {}, h("span.muted.grow", {}, "Keep puts it under Corrections, as a candidate for training."),
      cancel, keep));
}

function cut(message) {
  if (!["length", "stopped"].includes(message.stats?.reason) || message.id !== state.chat.leaf) return null;
  return h("button.text", { onclick: () => goOn(message), disabled: Boolean(live()),
    "data-key": `more-${message.id}` }, "Continue");
}

function stats(message, label) {
  const { tokens, seconds, reason, forgotten } = message.stats ?? {};
  const parts = [label, tokens && counted(tokens, "token"), tokens && seconds > 0 && `${Math.round(tokens / seconds).toLocaleString()} tokens/s`,
    { length: "cut at the limit", stopped: "stopped" }[reason],
    forgotten && `oldest ${forgotten === 1 ? "exchange" : `${forgotten} exchanges`} forgotten`, message.feedback?.correction && "corrected"];
  const title = reason === "length" ? "The longest answer is a setting of the chat; the model's context is a limit too."
    : forgotten ? "The conversation is longer than the model's context, so it no longer sees how it began." : null;
  return h("span.stats", { title }, parts.filter(Boolean).join(" · "));
}

/** An answer that is being made; slot.show draws its text as it grows, `grown` follows each drawing. */
export function liveAnswer(slot, { column = false, grown, given }) {
  if (slot.message) return answerMessage(slot.message, { column });
  const { model, phase, problem } = slot;
  const body = h("div.prose", {}, !slot.text && h("p.waiting", {}, h("span.dots", {}, h("i"), h("i"), h("i")),
    phase === "loading" && `Loading ${model}…`));
  const article = h("article", { class: `message answer live ${phase}`, "aria-label": `Answer of ${model}`, "aria-busy": "true" },
    column && h("div.who", {}, model), problem ? h("p.refused", {}, icon("warning"), h("span", {}, told(problem.text)))
      : [body, h("div.foot", {}, h("span.stats", {}, column ? "" : model))]);
  if (problem) return article;
  if (continues(model)) {
    slot.show = () => (continued(body, given).replaceChildren(body.firstChild, slot.text), grown());
    if (slot.text) slot.show();
    return article;
  }
  const growing = new Growing(body);
  growing.text = slot.text;
  if (slot.text) growing.draw();
  slot.show = () => growing.show(slot.text, grown);
  return article;
}

/** An error of the server as sentences; what it advises stands on a line of its own. */
function told(text) {
  const sentence = (words) => words.charAt(0).toUpperCase() + words.slice(1);
  return text.split(/\.? Fix: /).map((part) => h("p", {}, sentence(part).replace(/([^.!?:])$/, "$1.")));
}

export function problemCard(problem) {
  const title = { gone: "No answer", model: "The model could not answer" }[problem.kind] ?? "That did not work";
  return h("div.problem", { role: "alert" }, icon("warning"),
    h("div", {}, h("strong", {}, title), told(problem.text),
      problem.request && problem.kind !== "request" && h("button.plain", { onclick: () => retry(problem) }, "Try again")));
}
