// Answers that a person has written anew: candidates for training, to accept or to reject.

import { getJson, send } from "./api.js";
import { tell } from "./chat.js";
import { $, copyOf, h, toast } from "./dom.js";
import { render } from "./markdown.js";
import { loadModels, on, state } from "./state.js";

const TABS = [["candidate", "To decide"], ["accepted", "Accepted"], ["rejected", "Rejected"]];
const NONE = {
  candidate: "Nothing to decide. A thumb down under an answer asks what it should have said; that lands here.",
  accepted: "Nothing accepted yet.",
  rejected: "Nothing rejected.",
};
let rows = [];
let tab = "candidate";

export function start() {
  on("view", () => state.view === "corrections" && open());
  on("retraining", () => $("retraining")?.replaceWith(retraining()));
  on("retrained", () => {
    const done = state.retraining?.state === "done";
    toast(done ? "The training is done: the new model has the next question." : "The training did not finish; Corrections says why.");
  });
}

async function open() {
  $("latest").hidden = true;
  if (await tell(async () => ({ corrections: rows } = await getJson("/api/corrections")))) draw();
}

function draw() {
  if (state.view !== "corrections") return;
  const view = $("view");
  view.className = "corrections";
  view.setAttribute("aria-label", "Corrections");
  const of = (status) => rows.filter((row) => (row.status ?? "candidate") === status);
  const tabs = TABS.map(([status, label]) => h("button", { "aria-pressed": String(tab === status),
    onclick: () => ((tab = status), draw(), $("view").querySelector("[aria-pressed=true]").focus()) }, `${label} (${of(status).length})`));
  view.replaceChildren(
    h("h1", {}, "Corrections"),
    copyOf("corrections-help"),
    retraining(),
    h("div.tabs", { role: "group", "aria-label": "Which" }, tabs),
    ...(of(tab).length ? of(tab).map(card) : [h("p.muted.none", {}, NONE[tab])]));
}

/** Starts a training on what is accepted, and tells how it goes. */
function retraining() {
  const { state: now, text, taught } = state.retraining ?? {};
  if (!now) return h("div", { id: "retraining", hidden: true });
  const accepted = rows.filter((row) => row.status === "accepted").length;
  const start = () => tell(async () => {
    state.retraining = await send("POST", "/api/retraining");
    await loadModels();
  });
  const told = { running: "Training… The model as it is answers meanwhile.", done: `Done. The new model answers now; it learned from ${taught} of them.`,
    failed: "The training did not finish." }[now];
  return h("section", { id: "retraining", "aria-label": "Training" },
    h("button.primary", { onclick: start, disabled: now === "running" || !accepted },
      `Train on the accepted (${accepted})`),
    told && h("p", { role: "status" }, told), now !== "none" && text && h("pre.muted", {}, text));
}

const prose = (text) => h("div.prose", {}, render(text));

function card(row) {
  const question = row.prompt.filter((message) => message.role === "user").at(-1)?.content ?? "";
  const earlier = row.prompt.length - 1;
  const decide = (status, label, classes) => h("button", { class: classes, onclick: () => settle(row, status) }, label);
  const actions = tab === "candidate" ? [decide("rejected", "Reject", "plain"), decide("accepted", "Accept", "primary")]
    : decide("candidate", "Take back", "plain");
  return h("article.correction", { "data-id": row.id, "aria-label": `Correction of: ${question.slice(0, 80)}` },
    h("div.bubble", {}, question),
    h("div.halves", {},
      h("section.said", {}, h("h2", {}, `${row.model ?? "It"} said`), prose(row.answer)),
      h("section.should", {}, h("h2", {}, "It should have said"), prose(row.correction))),
    h("div.end", {},
      h("a.muted.grow", { href: `#/chat/${row.chat}` }, `No. ${row.id}, ${row.title || "Chat"}${earlier > 0 ? `, after ${earlier} earlier messages` : ""}`),
      actions));
}

async function settle(row, status) {
  const done = await tell(() => send("PATCH", `/api/corrections/${row.id}`, { status }));
  if (!done) return;
  row.status = status;
  draw();
  ($("view").querySelector(".correction button") ?? $("view").querySelector(".tabs button")).focus();
}
