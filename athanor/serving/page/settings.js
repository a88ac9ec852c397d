// System prompt and sampling of the shown chat.

import { tell } from "./chat.js";
import { $, copyOf, h, openDialog } from "./dom.js";
import { chosenModels, modelOf, on, patchChat, state } from "./state.js";

// name, label, help; of those with a slider its lowest and highest value and its step, and the value where a model has none
const FIELDS = [
  ["temperature", "Temperature", "0 always takes the likeliest word; higher is more varied.", 0, 2, 0.05, 0],
  ["top_k", "Top-k", "Draw among this many likeliest tokens; 0 is all.", 0, 200, 1, 0],
  ["top_p", "Top-p", "Draw among the likeliest tokens that make up this share.", 0.05, 1, 0.05, 1],
  ["min_p", "Min-p", "Leave out tokens below this share of the likeliest one.", 0, 1, 0.01, 0],
  ["repetition_penalty", "Repetition penalty", "Above 1, words used before become less likely.", 0.5, 2, 0.05, 1],
  ["max_new_tokens", "Longest answer", "In tokens; the model's context is a limit too.", 1, 1024, 1, 256],
  ["seed", "Seed", "Equal seeds give equal answers; empty draws a new one each time."],
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
  const model = modelOf(chosenModels()[0]);
  const save = (values) => {
    tell(() => patchChat(values, chat));
    show();
  };
  const set = (name, value) => {
    const { [name]: before, ...sampling } = chat.sampling;
    save({ sampling: value === null ? sampling : { ...sampling, [name]: value } });
  };
  const rows = [...FIELDS.map((field) => number(field, model, set)), chances(set)];
  const show = () => {
    reset.hidden = !Object.keys(chat.sampling).length;
    for (const { name, element, fill } of rows) {
      const own = chat.sampling[name];
      element.classList.toggle("changed", own !== undefined);
      fill(own);
    }
  };
  const dialog = openDialog("Settings of this chat", "drawer", ...copyOf("chat-settings").children,
    h("div.fields", {}, rows.map(({ element }) => element)));
  const [system, reset] = ["#system", "#reset"].map((selector) => dialog.querySelector(selector));
  system.value = chat.system ?? "";
  system.addEventListener("input", () => save({ system: system.value.trim() }));
  reset.addEventListener("click", () => save({ sampling: {} }));
  show();
  dialog.addEventListener("close", () => $("settings").focus());
}

/** A setting with its control, and the function that shows the chat's own value there. */
function row([name, label, help], control, fill, slider, usual) {
  const id = `help-${name}`;
  control.setAttribute("aria-describedby", id);
  return { name, fill, element: h("div.field", {}, h("label", { for: control.id }, label), control, slider, h("p.help", { id }, help, usual)) };
}

function number(field, model, set) {
  const [name, label, , low, high, step, plain = ""] = field;
  const slides = high !== undefined;
  const usual = model?.defaults?.[name] ?? plain;
  const input = h("input", { id: `set-${name}`, type: "number", inputmode: "decimal", ...slides
    ? { min: low === 0.05 ? 0.01 : low, step: "any" } : { min: 0, max: 2 ** 32 - 1, step: 1, placeholder: "random" } });
  const slider = h("input", { type: "range", min: low, max: (name === "max_new_tokens" && model?.context_tokens) || high, step,
    tabindex: "-1", "aria-label": label });
  const take = () => {
    const { value, validity } = input;
    if (validity.valid) set(name, value === "" || (slides && Number(value) === Number(usual)) ? null : Number(value));
  };
  slider.addEventListener("input", () => ((input.value = slider.value), take()));
  input.addEventListener("input", take);
  input.addEventListener("blur", () => (input.value ||= usual));
  const fill = (own = usual) => {
    slider.value = own;
    if (input !== document.activeElement) input.value = own; // else it would be written over while somebody types
  };
  return row(field, input, fill, slides && slider, slides && h("span.usual", {}, ` Model's own: ${usual}.`));
}

function chances(set) {
  const on = () => button.textContent === "On";
  const button = h("button.plain", { id: "set-chances", role: "switch", onclick: () => set("top_logprobs", on() ? null : TOLD) });
  const fill = (own) => {
    button.textContent = own ? "On" : "Off";
    button.setAttribute("aria-checked", String(on()));
  };
  return row(["top_logprobs", "Probabilities",
    "Tints the tokens of the next answers by how likely each was; point at one, or tap it, for what else was likely."], button, fill);
}
