// System prompt and sampling of the shown chat; what the drawer holds is in index.html.

import { tell } from "./chat.js";
import { $, copyOf, openDialog } from "./dom.js";
import { chosenModels, modelOf, on, patchChat, state } from "./state.js";

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
  const dialog = openDialog("Settings of this chat", "drawer", ...copyOf("chat-settings").children);
  const part = (selector) => dialog.querySelector(selector);
  const save = (values) => {
    tell(() => patchChat(values, chat));
    show();
  };
  const set = (name, value) => {
    const { [name]: before, ...sampling } = chat.sampling;
    save({ sampling: value === null ? sampling : { ...sampling, [name]: value } });
  };
  const lines = [...dialog.querySelectorAll(".field")];
  const show = () => {
    part("#reset").hidden = !Object.keys(chat.sampling).length;
    for (const line of lines) line.classList.toggle("changed", chat.sampling[line.dataset.name] !== undefined);
    const on = chat.sampling.top_logprobs !== undefined;
    part("#set-chances").setAttribute("aria-checked", String(on));
    part("#set-chances").textContent = on ? "On" : "Off";
  };
  const fields = lines.filter((line) => line.querySelector("input")).map((line) => number(line, chat, model, set));
  part("#system").value = chat.system ?? "";
  part("#system").addEventListener("input", ({ target }) => save({ system: target.value.trim() }));
  part("#set-chances").addEventListener("click", () => set("top_logprobs", chat.sampling.top_logprobs === undefined ? TOLD : null));
  part("#reset").addEventListener("click", () => (save({ sampling: {} }), fields.forEach((fill) => fill())));
  fields.forEach((fill) => fill());
  show();
  dialog.addEventListener("close", () => $("settings").focus());
}

/** A field and its slider, where it has one; returns what fills them in. */
function number(line, chat, model, set) {
  const { name, usual: plain } = line.dataset;
  const usual = model?.defaults?.[name] ?? plain;
  const [field, slider = {}] = line.querySelectorAll("input");
  if (name === "max_new_tokens" && model?.context_tokens) slider.max = model.context_tokens;
  const own = line.querySelector(".usual");
  if (own) own.textContent = ` Model's own: ${usual}.`;
  line.addEventListener("input", ({ target }) => {
    if (target === slider) field.value = slider.value;
    field.classList.toggle("wrong", !field.validity.valid);
    if (!field.validity.valid) return;
    slider.value = field.value || usual;
    set(name, field.value === "" || (own && Number(field.value) === Number(usual)) ? null : Number(field.value));
  });
  field.addEventListener("blur", () => (field.value ||= usual));
  return () => (slider.value = field.value = chat.sampling[name] ?? usual);
}
