// What a model is: from the card beside its weights, and from its own evaluation. The card is read as its Markdown says it.

import { getJson } from "./api.js";
import { tell } from "./chat.js";
import { submit } from "./composer.js";
import { bar, h, openDialog } from "./dom.js";
import { parsed, render } from "./markdown.js";
import { modelOf } from "./state.js";

// What the monitor says of a training, best first.
const HEALTH = { ok: "healthy", info: "healthy", warning: "with warnings", critical: "in trouble at times" };
const words = (name) => name.charAt(0).toUpperCase() + name.slice(1).replaceAll("_", " ");

export function openAbout(id) {
  if (document.querySelector("dialog.drawer")) return;
  tell(async () => show(id, await getJson(`/api/models/${encodeURIComponent(id)}/about`)));
}

/** The rows of the first table that has these columns, each as {column: text}. */
function rowsOf(tokens, ...columns) {
  const found = tokens.find((token) => token.type === "table" && columns.every((name) => token.header.some((cell) => cell.text === name)));
  return (found?.rows ?? []).map((row) => Object.fromEntries(row.map((cell, at) => [found.header[at].text, cell.text])));
}

const part = (title, rows, help = null) => rows.length ? [h("h3", {}, title), help && h("p.help", {}, help), h("ul.facts", {}, rows)] : [];
const line = (name, value, more) => h("li", {}, h("span.grow", {}, name), h("span.figure", {}, value), more && h("p.help", {}, more));

function show(id, { card, topics, commit, health }) {
  const tokens = parsed(card.replace(/^---\n[\s\S]*?\n---\n/, ""));
  const shape = Object.fromEntries(rowsOf(tokens, "property", "value").map((row) => [row.property, row.value.replace(/ \(.*/, "")]));
  const model = modelOf(id);
  const made = model?.created ? new Date(model.created * 1000).toLocaleDateString(undefined, { dateStyle: "medium" }) : "";
  const facts = [shape.parameters && `${shape.parameters} parameters`, shape.context && `sees ${shape.context}`,
    made && `made ${made}`, commit && `commit ${commit.slice(0, 7)}`].filter(Boolean).join(" · ");
  const dialog = openDialog(`About ${id}`, "drawer about",
    h("p", {}, model?.label !== id && h("span", {}, model?.label, h("br")), facts),
    part("Trained on", sources(tokens)),
    ...lessons(tokens, topics, card, () => dialog),
    part("Checks", checks(tokens, health)),
    card ? h("button.plain", { onclick: () => (dialog.close(), openDialog(`Card of ${id}`, "box whole", h("div.prose", {}, render(card)))) }, "The whole card")
      : h("p.muted", {}, "This model has no card."));
}

function sources(tokens) {
  const licences = new Map(rowsOf(tokens, "source", "licence", "train documents").map((row) => [row.source, row.licence]));
  const mixed = rowsOf(tokens, "source", "share", "wanted share").map((row) => line(row.source, row.share,
    `${row.tokens} tokens${row["times read"] ? ` · read ${row["times read"]} times` : ""} · ${licences.get(row.source) ?? "licence not stated"}`));
  const talks = rowsOf(tokens, "source", "conversations", "licence").map((row) => line(`${row.source}: conversations`, `at most ${row.train}`, row.licence));
  return [...mixed, ...talks];
}

/** Scores of the card, with a question to ask where the model has answered one. */
function lessons(tokens, topics, card, dialog) {
  const chance = /Not clearly above its floor[^:]*: ([^.]*)\./.exec(card)?.[1].split(", ") ?? [];
  const known = new Map(topics.map((topic) => [topic.name, topic]));
  const row = ({ category, sft }) => {
    const { question, taught } = known.get(category) ?? {};
    return h("li", {}, h("span.grow", {}, words(category)), chance.includes(category) && h("span.muted", {}, "as chance"),
      bar(parseFloat(sft) / 100), h("span.figure", {}, sft),
      taught && question && h("button.example", { onclick: () => (dialog().close(), submit(question)) }, question));
  };
  const rows = rowsOf(tokens, "category", "sft");
  const all = rows.find(({ category }) => category === "all");
  const scores = rows.filter((one) => one !== all).sort((a, b) => parseFloat(b.sft) - parseFloat(a.sft));
  const taught = scores.filter(({ category }) => known.get(category)?.taught ?? true);
  return [part(known.size ? "What it was taught" : "What it was asked", taught.map(row), `Right answers to questions it had not seen (± standard error)${all ? `; of all ${all.items}: ${all.sft}` : ""}. Press a question to ask it.`),
    part("Not taught, only read", scores.filter((score) => !taught.includes(score)).map(row), "What its texts alone have left. As chance: no better than a blind guess.")];
}

function checks(tokens, health) {
  const training = Object.values(health).filter(Boolean);
  const worst = Object.keys(HEALTH).findLast((name) => training.includes(name));
  const behaviour = new Map(rowsOf(tokens, "", "share of answers").map((row) => [row[""], row["share of answers"]]));
  const alike = rowsOf(tokens, "runtime", "compared with torch").map((row) => row.runtime.replaceAll("_", " "));
  return [worst && line("Training", HEALTH[worst]), behaviour.has("stop") && line("Answers that end by themselves", behaviour.get("stop")),
    alike.length && line("Answers alike in other runtimes", "yes", alike.join(", "))].filter(Boolean);
}
