// Draws the conversation and keeps the reader's place in it.

import { openAbout } from "./about.js";
import { live, shownPath } from "./chat.js";
import { submit } from "./composer.js";
import { $, copyOf, h } from "./dom.js";
import { answerMessage, liveAnswer, problemCard, userMessage } from "./messages.js";
import { chosenModels, continues, modelOf, on, state } from "./state.js";
import { openComparison, pathTo } from "./tree.js";

const NEAR = 60; // pixels from the end that still count as the end
let pinned = true;
let offered = ""; // the questions of the welcome that is drawn

export function start() {
  const scroller = $("scroll");
  scroller.addEventListener("scroll", () => {
    pinned = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < NEAR;
    $("latest").hidden = pinned || state.view !== "chat";
  }, { passive: true });
  $("latest").addEventListener("click", () => (toEnd(true), $("question").focus()));
  new ResizeObserver(() => pinned && toEnd()).observe(scroller);
  document.addEventListener("formulas", () => pinned && toEnd());
  on("thread", draw);
  on("models", () => document.querySelector("#view .welcome") && offered !== offer() && draw());
  on("asked", () => (pinned = true));
  let before;
  on("chat", () => {
    if (before !== state.chat.id) pinned = true;
    before = state.chat.id;
  });
}

function toEnd(smoothly = false) {
  const calm = matchMedia("(prefers-reduced-motion: reduce)").matches;
  // A text that grows runs away from a slow scroll.
  const slowly = smoothly && !calm && !live();
  $("scroll").scrollTo({ top: $("scroll").scrollHeight, behavior: slowly ? "smooth" : "instant" });
  pinned = true;
  $("latest").hidden = true;
}

function follow() {
  if (pinned) toEnd();
  else $("latest").hidden = false;
}

function draw() {
  if (state.view !== "chat") return;
  const { dataset, selectionStart, selectionEnd } = document.activeElement ?? {};
  const focused = dataset?.key;
  const { scrollTop } = $("scroll");
  const turns = conversation();
  const view = $("view");
  view.className = turns.length ? "thread" : "empty";
  view.setAttribute("aria-label", "Conversation");
  view.replaceChildren(...(turns.length ? turns : welcome()));
  [...view.querySelectorAll(":scope > .answer")].at(-1)?.classList.add("newest");
  const again = focused && view.querySelector(`[data-key="${CSS.escape(focused)}"]:not(:disabled)`);
  again?.focus({ preventScroll: true });
  if (selectionStart !== undefined) again?.setSelectionRange?.(selectionStart, selectionEnd);
  if (pinned) toEnd();
  else $("scroll").scrollTop = scrollTop;
}

function conversation() {
  const { chat } = state;
  const now = live();
  const problem = state.problems.get(chat.id);
  const elements = now ? during(chat, now) : settled(chat);
  if (problem) elements.push(problemCard(problem));
  return elements;
}

const single = (message, at, path) =>
  message.role === "user" ? userMessage(message, path[at + 1] ? [path[at + 1].model] : []) : answerMessage(message);

function settled(chat) {
  const path = shownPath();
  const pair = openComparison(chat);
  if (!pair) return path.map(single);
  return [...path.slice(0, -1).map(single), columns(pair.map((message) => answerMessage(message, { column: true })),
    "Pick the answer to go on with, or just write: that goes on from the first.")];
}

function during(chat, now) {
  const { request, slots, user } = now;
  const column = slots.length > 1;
  const answers = slots.map((slot) => liveAnswer(slot, { column, grown: follow, given: user.content }));
  return [...pathTo(chat, user.parent).map(single), userMessage(request.user ? user : { ...user, id: null }, slots.map((slot) => slot.model)),
    ...column ? [columns(answers, "")] : answers];
}

function columns(answers, hint) {
  answers.forEach((answer, at) => answer.querySelector(".who").append(h("span.which", {}, `${at + 1} of ${answers.length}`)));
  return h("div.comparison", {}, h("div.pair", { tabindex: "0", role: "group", "aria-label": "Two answers" }, answers),
    hint && h("p.muted.hint", {}, hint));
}

/** Questions that the chosen model was asked in its own evaluation, and answered. */
const starters = () => modelOf(chosenModels()[0])?.starters ?? [];
const offer = () => JSON.stringify([starters(), continues(chosenModels()[0])]);

function welcome() {
  if (!state.known || state.chat.unread) return [];
  if (!state.models.length) return [copyOf("no-model")];
  const cards = starters().map(({ title, text }) => h("button.card", { onclick: () => submit(text) },
    h("span.muted", {}, title), h("span", {}, text)));
  offered = offer();
  const view = copyOf(continues(chosenModels()[0]) ? "welcome-base" : "welcome");
  if (cards.length) view.append(h("div.cards", {}, cards));
  if (chosenModels().length) {
    view.append(h("button.text.more", { onclick: () => openAbout(chosenModels()[0]) }, "What it was taught, and what it is made of"));
  }
  return [view];
}
