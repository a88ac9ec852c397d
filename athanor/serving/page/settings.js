// System prompt and sampling of the shown chat.

import { tell } from "./chat.js";
import { $, h, iconButton, openDialog } from "./dom.js";
import { chosenModels, modelOf, on, patchChat, state } from "./state.js";

// name, label, help, lowest, highest of the slider, step, value where the model tells none
const FIELDS = [
  ["temperature", "Temperature", "0 always takes the likeliest word; higher is more varied.", 0, 2, 0.05, 0],
  ["top_k", "Top-k", "Draw among this many likeliest tokens; 0 is all.", 0, 200, 1, 0],
  ["top_p", "Top-p", "Draw among the likeliest tokens that make up this share.", 0.05, 1, 0.05, 1],
  ["min_p", "Min-p", "Leave out tokens below this share of the likeliest one.", 0, 1, 0.01, 0],
  ["repetition_penalty", "Repetition penalty", "Above 1, words it has used become less likely.", 0.5, 2, 0.05, 1],
  ["max_new_tokens", "Longest answer", "In tokens; the model's context is a limit too.", 1, 1024, 1, 256],
];

const TOLD = 5; // likely tokens at each step

export function start() {
  $("settings").addEventListener("click", open);
  on("chat", mark);
  on("thread", mark);
  mark();
}

/** A dot on the button tells that this chat has settings of its own. */
function mark() {
  const { system, sampling } = state.chat;
  $("settings").classList.toggle("changed", Boolean(system || Object.keys(sampling).length));
  $("settings").disabled = state.chat.unread;
}

export function open() {
  if (document.querySelector("dialog.drawer") || state.chat.unread) return;
  const { chat } = state;
  const defaults = modelOf(chosenModels()[0])?.defaults ?? {};
  const limit = modelOf(chosenModels()[0])?.context_tokens;
  let timer = null;
  let waiting = null;
  const flush = () => {
    clearTimeout(timer);
    if (!waiting) return;
    const values = waiting;
    waiting = null;
    tell(() => patchChat(values, chat));
  };
  const save = (values) => {
    Object.assign(chat, values); // counts for the next question even before the server has it
    waiting = { ...waiting, ...values };
    clearTimeout(timer);
    timer = setTimeout(flush, 400);
    reset.hidden = !Object.keys(chat.sampling).length;
    mark();
  };
  const set = (name, value) => {
    const sampling = { ...chat.sampling };
    if (value === null || Number.isNaN(value)) delete sampling[name];
    else sampling[name] = value;
    save({ sampling });
  };
  const system = h("textarea", { id: "system", rows: "4", value: chat.system ?? "", placeholder: "You are a helpful assistant." });
  system.addEventListener("input", () => save({ system: system.value.trim() }));
  const rows = h("div", { class: "fields" });
  const fill = () => rows.replaceChildren(...FIELDS.map((field) => row(field, chat, defaults, limit, set)), seed(chat, set), chances(chat, set));
  const reset = h("button", { type: "button", class: "plain", onclick: () => (save({ sampling: {} }), fill()) }, "Reset sampling");
  reset.hidden = !Object.keys(chat.sampling).length;
  fill();
  const dialog = openDialog("Settings of this chat", "drawer",
    h("div", { class: "drawer-head" }, h("h2", {}, "Settings of this chat"), iconButton("close", "Close the settings", () => dialog.close())),
    h("label", { for: "system" }, "System prompt"), system,
    h("p", { class: "help" }, "Goes before the conversation. A model that was not trained with one may ignore it."),
    h("div", { class: "drawer-head" }, h("h3", {}, "Sampling"), reset), rows);
  dialog.addEventListener("close", () => (flush(), $("settings").focus()));
}

function row([name, label, help, low, high, step, plain], chat, defaults, limit, set) {
  if (name === "max_new_tokens" && limit) high = limit;
  const usual = defaults[name] ?? plain;
  const value = chat.sampling[name] ?? usual;
  const slider = h("input", { type: "range", min: low, max: high, step, "aria-label": label, value, tabindex: "-1" });
  const field = h("input", { type: "number", id: `set-${name}`, min: low === 0.05 ? 0.01 : low, step: "any", value,
    "aria-describedby": `help-${name}`, inputmode: "decimal" });
  const line = h("div", { class: "field" }, h("label", { for: field.id }, label), field, slider,
    h("p", { class: "help", id: `help-${name}` }, help, h("span", { class: "usual" }, ` Model's own: ${usual}.`)));
  const mark = () => line.classList.toggle("changed", chat.sampling[name] !== undefined);
  const take = (text) => {
    const number = text.trim() === "" ? null : Number(text);
    set(name, number === usual ? null : number);
    mark();
  };
  slider.addEventListener("input", () => ((field.value = slider.value), take(slider.value)));
  field.addEventListener("input", () => {
    field.classList.toggle("wrong", !field.validity.valid);
    if (!field.validity.valid) return;
    slider.value = field.value || usual;
    take(field.value);
  });
  field.addEventListener("blur", () => field.value === "" && (field.value = usual));
  mark();
  return line;
}

function chances(chat, set) {
  const field = h("button", { type: "button", class: "plain", id: "set-chances", role: "switch", "aria-describedby": "help-chances",
    disabled: chosenModels().every((id) => modelOf(id)?.backend === "transformers") });
  const line = h("div", { class: "field" }, h("label", { for: field.id }, "Probabilities"), field,
    h("p", { class: "help", id: "help-chances" }, "Tints the tokens of the next answers by how likely each was; point at one, or tap it, for what else was likely."));
  const on = () => chat.sampling.top_logprobs !== undefined;
  const mark = () => {
    line.classList.toggle("changed", on());
    field.setAttribute("aria-checked", String(on()));
    field.textContent = on() ? "On" : "Off";
  };
  field.addEventListener("click", () => (set("top_logprobs", on() ? null : TOLD), mark()));
  mark();
  return line;
}

function seed(chat, set) {
  const field = h("input", { type: "number", id: "set-seed", min: "0", max: "4294967295", step: "1", value: chat.sampling.seed ?? "", placeholder: "random",
    "aria-describedby": "help-seed", inputmode: "numeric" });
  const line = h("div", { class: "field" }, h("label", { for: "set-seed" }, "Seed"), field,
    h("p", { class: "help", id: "help-seed" }, "Equal seeds give equal answers; empty draws a new one each time."));
  const mark = () => line.classList.toggle("changed", chat.sampling.seed !== undefined);
  field.addEventListener("input", () => {
    if (!field.validity.valid) return;
    set("seed", field.value === "" ? null : Number(field.value));
    mark();
  });
  mark();
  return line;
}
