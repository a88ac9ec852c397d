// Keyboard shortcuts, and the list of them.

import { live, stop } from "./chat.js";
import { $, h, iconButton, openDialog } from "./dom.js";
import { open as openSettings } from "./settings.js";
import { drawer, focusSearch } from "./sidebar.js";

const mac = /Mac|iPhone|iPad/.test(navigator.platform);
const MOD = mac ? "⌘" : "Ctrl";

const KEYS = [
  [["Enter"], "Send"],
  [["Shift", "Enter"], "New line"],
  [["Esc"], "Stop the answer, or close what is open"],
  [["↑"], "Edit your last question (in an empty field)"],
  [[MOD, "K"], "Search chats"],
  [[MOD, "Shift", "O"], "New chat"],
  [[MOD, "Shift", "S"], "Settings of this chat"],
  [[MOD, "Shift", "C"], "Copy the last answer"],
  [["?"], "This list"],
];

export function start() {
  $("show-keys").addEventListener("click", showKeys);
  document.addEventListener("keydown", onKey);
}

const typing = (target) => target.matches?.("input, textarea, select, [contenteditable]");

function onKey(event) {
  if (event.isComposing || document.querySelector("dialog[open]")) return;
  const mod = event.ctrlKey || event.metaKey;
  const key = event.key.toLowerCase();
  let done = true;
  if (key === "escape") done = escape(event);
  else if (mod && !event.shiftKey && !event.altKey && key === "k") focusSearch();
  else if (mod && event.shiftKey && key === "o") newChat();
  else if (mod && event.shiftKey && key === "s") openSettings();
  else if (mod && event.shiftKey && key === "c") [...document.querySelectorAll("[aria-label='Copy the answer']")].at(-1)?.click();
  else if (!mod && key === "?" && !typing(event.target)) showKeys();
  else if (key === "arrowup" && event.target.id === "question" && !event.target.value) {
    const last = [...document.querySelectorAll("[data-key^='edit-']:not(:disabled)")].at(-1);
    last?.click();
    document.querySelector("textarea.edit")?.focus();
    done = Boolean(last);
  } else done = false;
  if (done) event.preventDefault();
}

function escape(event) {
  if (drawer(false)) return true;
  if (event.target.id === "search") {
    event.target.value = "";
    event.target.dispatchEvent(new Event("input"));
    $("question").focus();
    return true;
  }
  if (!live()) return false;
  stop();
  return true;
}

export function newChat() {
  drawer(false);
  location.hash = "#/";
  $("question").focus();
}

function showKeys() {
  const rows = KEYS.map(([keys, text]) => h("div", {}, h("dt", {}, keys.map((key) => h("kbd", {}, key))), h("dd", {}, text)));
  const dialog = openDialog("Keyboard shortcuts", "box keys",
    h("div", { class: "drawer-head" }, h("h2", {}, "Keyboard shortcuts"), iconButton("close", "Close the list", () => dialog.close())),
    h("dl", {}, rows));
}
