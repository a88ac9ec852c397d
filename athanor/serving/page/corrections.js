// Corrections: candidates for training

import { getJson, send } from "./api.js";
import { tell } from "./chat.js";
import { $, copyOf, counted, h, toast } from "./dom.js";
import { render } from "./markdown.js";
import { loadModels, on, state } from "./state.js";

const TABS = [["candidate", "To decide"], ["accepted", "Accepted"], ["rejected", "Rejected"]];
let rows = [];
let tab = "candidate";

export function start() {
  on("view", () => state.view === "corrections" && open().then(loadModels).catch(() => {}));
  on("retraining", () => $("retraining") && open(true));
  on("retrained", () => toast("The training has ended; Corrections says how."));
}

/** `again`: only what has changed is drawn, to keep the focus. */
async function open(again) {
  $("latest").hidden = true;
  const before = JSON.stringify(rows);
  if (!(await tell(async () => ({ corrections: rows } = await getJson("/api/corrections"))))) return;
  if (!again || before !== JSON.stringify(rows)) return draw();
  const now = retraining();
  if (!now.isEqualNode($("retraining"))) $("retraining")?.replaceWith(now);
}

function draw() {
  if (state.view !== "corrections") return;
  const view = $("view");
  view.className = "corrections";
  view.setAttribute("aria-label", "Corrections");
  const of = (status) => rows.filter((row) => row.status === status);
  const tabs = TABS.map(([status, label]) => h("button", { "aria-pressed": String(tab === status),
    onclick: () => ((tab = status), draw(), $("view").querySelector("[aria-pressed=true]").focus()) }, `${label} (${of(status).length})`));
  view.replaceChildren(
    h("h1", {}, "Corrections"),
    copyOf("corrections-help"),
    retraining(),
    h("div.tabs", { role: "group", "aria-label": "Which" }, tabs),
    ...(of(tab).length ? of(tab).map(card) : [copyOf("no-corrections")]));
}

function retraining() {
  const { state: now, text, taught } = state.retraining ?? {};
  if (!now) return h("div", { id: "retraining", hidden: true });
  const accepted = rows.filter((row) => row.status === "accepted");
  const usable = accepted.filter((row) => !row.left_out).length;
  const counts = now !== "running" && accepted.length ? ` (${usable} of ${accepted.length})` : "";
  const call = (method) => () => tell(() => send(method, "/api/retraining").then(loadModels));
  const told = { running: "Training… The model as it is answers meanwhile.", done: `Done. The new model answers now; it learned from ${taught} of them.`,
    stopped: "Stopped. The same button resumes it.", failed: "The training did not finish." }[now];
  return h("section", { id: "retraining", "aria-label": "Training" },
    h("button.primary", { onclick: call("POST"), disabled: now === "running" || !usable && !taught },
      usable || !taught ? `Train on the accepted${counts}` : "Train without them"),
    now === "running" && h("button.plain", { onclick: call("DELETE") }, "Stop"),
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
      h("section.said", {}, h("h2", {}, `${row.model} said`), prose(row.answer)),
      h("section.should", {}, h("h2", {}, "It should have said"), prose(row.correction))),
    row.left_out && h("p", {}, `Left out of training: ${row.left_out}.`),
    h("div.end", {},
      h("a.muted.grow", { href: `#/chat/${row.chat}` }, `No. ${row.id}, ${row.title || "Chat"}${earlier > 0 ? `, after ${counted(earlier, "earlier message")}` : ""}`),
      actions));
}

async function settle(row, status) {
  if (!(await tell(() => send("PATCH", `/api/corrections/${row.id}`, { status })))) return;
  await open();
  ($("view").querySelector(".correction button") ?? $("view").querySelector(".tabs button")).focus();
}
