// Starts the page: parts, theme, address, contact with the server.

import { contact } from "./api.js";
import { openChat, reread } from "./chat.js";
import { elsewhere } from "./chats.js";
import * as composer from "./composer.js";
import * as corrections from "./corrections.js";
import { $, icon, setIcon, setLabel, toast } from "./dom.js";
import * as keys from "./keys.js";
import * as models from "./models.js";
import * as settings from "./settings.js";
import * as sidebar from "./sidebar.js";
import { addressed, changed, loadModels, recall, remember, state } from "./state.js";
import * as thread from "./thread.js";

const THEMES = { auto: ["auto", "as the system has it"], light: ["sun", "light"], dark: ["moon", "dark"] };
const RETRY_MS = 2000;

function theme(name) {
  document.documentElement.dataset.theme = name;
  setIcon($("theme"), THEMES[name][0]);
  setLabel($("theme"), `Colours: ${THEMES[name][1]}`);
}

function nextTheme() {
  const names = Object.keys(THEMES);
  const name = names[(names.indexOf(document.documentElement.dataset.theme) + 1) % names.length];
  theme(name);
  remember("theme", name);
}

/** The address says what is shown: #/ a new chat, #/chat/ID, #/corrections. */
async function route() {
  if (location.hash === "#/corrections") {
    state.view = "corrections";
    changed("view", "composer");
    return;
  }
  try {
    if (!(await openChat(addressed()))) missing();
  } catch (error) {
    toast(error.message);
  }
}

function missing() {
  toast("That chat is not in this browser.");
  location.hash = "#/";
}

let gone;

function onContact({ detail: reached }) {
  $("gone").hidden = reached;
  clearInterval(gone);
  if (!reached) gone = setInterval(() => refresh().catch(() => {}), RETRY_MS);
}

async function refresh() {
  const first = !state.known;
  await loadModels();
  sidebar.refresh(); // what was deleted without contact is deleted there, too
  if (first) changed("thread", "composer");
}

for (const element of document.querySelectorAll("[data-icon]")) element.prepend(icon(element.dataset.icon));
theme(recall("theme") in THEMES ? recall("theme") : "auto");
$("theme").addEventListener("click", nextTheme);
for (const part of [thread, models, composer, settings, sidebar, corrections, keys]) part.start();
$("new-chat").addEventListener("click", () => setTimeout(() => $("question").focus()));
contact.addEventListener("change", onContact);
addEventListener("hashchange", route);
document.addEventListener("visibilitychange", () => document.hidden || refresh().catch(() => {}));
elsewhere.addEventListener("message", async ({ data }) => {
  sidebar.refresh();
  if ((data ?? state.chat.id) === state.chat.id && !(await reread())) missing();
});
sidebar.refresh();
route();
refresh().catch((error) => error.kind === "gone" || toast(error.message, null, 20));
