// The field for questions, with send and stop.

import { ask, live, stop } from "./chat.js";
import { $, onEnter } from "./dom.js";
import { draft, setDraft } from "./drafts.js";
import { chosenModels, continues, on, state } from "./state.js";

const TALLEST = 0.4; // share of the window
let shown; // id of the chat whose draft is in the field

export function start() {
  const field = $("question");
  field.addEventListener("input", () => {
    setDraft(state.chat.id, field.value);
    fit();
    buttons();
  });
  onEnter(field, submit);
  $("composer").addEventListener("submit", (event) => (event.preventDefault(), submit()));
  $("composer").addEventListener("pointerdown", (event) => {
    if (event.target === event.currentTarget) setTimeout(() => field.focus());
  });
  $("stop").addEventListener("click", () => (stop(), field.focus()));
  addEventListener("resize", fit);
  on("composer", refresh);
  on("fresh", focus);
  on("models", buttons);
  refresh();
}

export function submit(text = $("question").value) {
  text = text.trim();
  if (!text || live() || !chosenModels().length) return;
  setDraft(state.chat.id, "");
  refresh();
  ask(text);
}

function refresh() {
  const field = $("question");
  const text = draft(state.chat.id);
  if (field.value !== text) field.value = text;
  if (shown !== state.chat.id) {
    shown = state.chat.id;
    focus();
  }
  fit();
  buttons();
}

/** On a phone the focus would open the keyboard over the conversation. */
const focus = () => matchMedia("(pointer: fine)").matches && $("question").focus({ preventScroll: true });

function fit() {
  const field = $("question");
  field.style.height = "auto";
  field.style.height = `${Math.min(field.scrollHeight, innerHeight * TALLEST)}px`;
}

function buttons() {
  const answering = Boolean(live());
  const stopHad = document.activeElement === $("stop");
  $("send").hidden = answering;
  $("stop").hidden = !answering;
  $("send").disabled = !$("question").value.trim() || !chosenModels().length;
  if (stopHad && !answering) $("question").focus();
  const models = chosenModels().length;
  $("question").placeholder = state.known && !state.models.length ? "No model yet" : models === 2 ? "Ask both models"
    : continues(chosenModels()[0]) ? "A text to go on with" : "Ask something";
  $("dock").hidden = state.view !== "chat";
  $("main").classList.toggle("aside", state.view !== "chat");
}
