// Which model answers, or which two are compared.

import { openAbout } from "./about.js";
import { live, tell } from "./chat.js";
import { $, h, icon, openMenu, setLabel } from "./dom.js";
import { chosenModels, loadModels, modelOf, on, patchChat, remember, state } from "./state.js";

const SOURCES = { export: "this workspace", experiment: "experiment", path: "given folder", undone: "a run that is not done" };
const STATES = { idle: "starts with the first question", loading: "loading…", ready: "ready", failed: "failed" };

export function start() {
  on("models", draw);
  on("composer", draw);
  $("compare").addEventListener("click", toggle);
}

const { format: count } = new Intl.NumberFormat("en", { notation: "compact" });

function details(model) {
  const parts = [SOURCES[model.source] ?? model.source, model.parameters && `${count(model.parameters)} parameters`,
    model.context_tokens && `context ${model.context_tokens.toLocaleString()} tokens`, STATES[model.state] ?? model.state];
  return h("span.details", {}, parts.filter(Boolean).join(" · "),
    model.reason && h("span.reason", {}, model.reason));
}

function draw() {
  const chosen = chosenModels();
  const focused = document.activeElement?.id;
  const buttons = chosen.map((id, slot) => {
    const model = modelOf(id);
    return h("button.model", { id: `model-${slot}`, "aria-haspopup": "menu", "aria-expanded": "false",
      title: [model?.label, model?.reason ?? STATES[model?.state]].filter(Boolean).join(": "), onclick: (event) => choose(event.currentTarget, slot) },
      h("span", { class: `dot ${model?.state}`, role: "img", "aria-label": STATES[model?.state] ?? "" }),
      h("span.label", {}, id), icon("chevron"));
  });
  if (buttons.length === 2) buttons.splice(1, 0, h("span.muted.versus", {}, "vs"));
  $("models").replaceChildren(...buttons);
  if (focused?.startsWith("model-")) $(focused)?.focus();
  const comparing = chosen.length === 2;
  setLabel($("compare"), state.models.length < 2 ? "Comparing needs two models" : comparing ? "Stop comparing" : "Compare two models");
  $("compare").setAttribute("aria-pressed", String(comparing));
  $("compare").disabled = state.models.length < 2 || !chosen.length || Boolean(live());
}

function choose(button, slot) {
  loadModels().catch(() => {});
  const chosen = chosenModels();
  const about = chosen[slot] && { label: `About ${chosen[slot]}`, icon: "info", run: () => openAbout(chosen[slot]) };
  openMenu(button, "Model", [...state.models.map((model) => ({
    label: h("span.label", {}, h("span", { class: `dot ${model.state}` }), model.label),
    detail: details(model),
    checked: chosen[slot] === model.id,
    run: () => {
      const models = [...chosen];
      if (models.length === 2 && models[1 - slot] === model.id) models[1 - slot] = models[slot];
      models[slot] = model.id;
      if (slot === 0) remember("model", model.id);
      tell(() => patchChat({ models }));
      $(`model-${slot}`)?.focus();
    },
  })), about].filter(Boolean), "models");
}

function toggle() {
  const [first, second] = chosenModels();
  const others = state.models.filter((model) => model.id !== first);
  const other = others.find((model) => model.state !== "failed") ?? others[0];
  return tell(() => patchChat({ models: second ? [first] : [first, other.id] }));
}
