// Which parts of an answer stand word for word in the training data, and where; looked up when it is asked for.

import { send } from "./api.js";
import { counted, h } from "./dom.js";
import { changed } from "./state.js";

const traces = new Map(); // id of a message -> its trace, {problem}, or {} while it is looked up
const STEPS = 5;
const CODE = /^```|^(?:async def|def|class) .*:|\n[ \t]+\S/m; // what markdown.js shows as code

export const isTraced = (message) => traces.has(message.id);

export async function toggleTrace(message) {
  if (traces.delete(message.id)) return changed("thread");
  traces.set(message.id, {});
  changed("thread");
  let trace;
  try {
    trace = await send("POST", `/api/models/${encodeURIComponent(message.model)}/trace`, { text: message.content });
  } catch (error) {
    trace = { problem: error.message };
  }
  if (!traces.has(message.id)) return; // closed meanwhile
  traces.set(message.id, trace);
  changed("thread");
}

/** The answer as it was written, with its spans marked; null where none are shown. */
export function marked(message) {
  const { pieces } = traces.get(message.id) ?? {};
  return pieces ? h(`div.prose.tokens${CODE.test(message.content) ? ".code-like" : ""}`, {}, pieces.map(([text, number]) => number === null ? text
    : h("mark", {}, text, h("sup", {}, String(number))))) : null;
}

/** Where the spans stand; null where nobody asked. */
export function sources(message) {
  const trace = traces.get(message.id);
  if (!trace) return null;
  const panel = (...children) => h("section.origins", { "aria-label": "Where this is from", role: "status" }, children);
  if (trace.problem) return panel(h("p", {}, trace.problem));
  if (!trace.pieces) return panel(h("p.muted", {}, "Looking through the training data…"));
  return panel(...trace.spans.flatMap(spanSources), h("p.muted", {},
    `${trace.found} of ${trace.tokens} tokens stand in the training data, in spans of at least ${trace.min_words} words or as the whole answer${trace.found < trace.tokens ? "; the others are the model's own words" : ""}.`));
}

function spanSources({ times, documents, places }, at) {
  const more = documents - places.length;
  return [h("h3", {}, `${at + 1} · ${counted(times, "time")} in ${counted(documents, "different text")}`),
    h("ul.facts", {}, places.map(source), more > 0 && h("li.muted", {}, `and ${more.toLocaleString()} more`))];
}

function source({ kind, id, source, license, about, part, copies, steps }) {
  const where = { question: "in the question: ", answer: "in the answer to: " }[part] ?? "";
  return h("li", {}, h("span.grow", {}, `${source} · ${license}`), about && h("p.help", {}, where + about),
    h("p.help", {}, `${kind} ${id.slice(0, 12)} · ${counted(copies, "time")} in the data · ${read(kind, steps)}`));
}

function read(kind, steps) {
  if (!steps) return "no model here was trained on it";
  if (!steps.length) return "not read before these weights were made";
  const shown = steps.slice(0, STEPS).map((step) => step.toLocaleString()).join(", ");
  return `read at ${kind === "document" ? "pretraining" : "fine-tuning"} step${steps.length > 1 ? "s" : ""} ${shown}`
    + (steps.length > STEPS ? ` and ${steps.length - STEPS} more` : "");
}
