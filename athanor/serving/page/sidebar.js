// Earlier chats: search, open, rename, export, import, delete with undo.

import { tell } from "./chat.js";
import * as chats from "./chats.js";
import { $, h, iconButton, moveFocus, openMenu, toast } from "./dom.js";
import { on, recall, remember, state } from "./state.js";

let words = "";
let renaming = null;
let asked = 0;

export function start() {
  let timer;
  $("search").addEventListener("input", () => {
    words = $("search").value.trim();
    clearTimeout(timer);
    timer = setTimeout(refresh, 120);
  });
  $("search").addEventListener("keydown", (event) => event.key === "Enter" && $("chats").querySelector("a")?.click());
  for (const place of [$("search"), $("chats")]) {
    place.addEventListener("keydown", (event) => {
      const from = document.activeElement.closest("li")?.querySelector("a") ?? $("search");
      if (/^Arrow(Up|Down)$/.test(event.key)) moveFocus(event, [$("search"), ...$("chats").querySelectorAll("a")], from);
    });
  }
  for (const name of ["open-sidebar", "close-sidebar"]) $(name).addEventListener("click", toggle);
  $("shade").addEventListener("click", () => drawer(false));
  $("sidebar").addEventListener("click", (event) => event.target.closest("a") && drawer(false));
  $("files").addEventListener("click", () => openMenu($("files"), "Chats as a file", [
    { label: "Import chats (JSON)", icon: "up", run: load },
    { label: "Export all chats (JSON)", icon: "download", run: () => tell(chats.exportAll) },
  ]));
  $("export").addEventListener("click", () => openMenu($("export"), "Export", exports(state.chat.id)));
  document.documentElement.classList.toggle("folded", recall("sidebar") === "folded");
  on("chats", draw);
  on("view", draw);
  on("answered", refresh);
  const exportable = () => ($("export").disabled = !state.chat.messages.length);
  on("chat", exportable);
  on("answered", exportable);
}

const narrow = () => matchMedia("(max-width: 760px)").matches;

function toggle() {
  if (narrow()) return drawer(!document.documentElement.classList.contains("drawn"));
  const folded = document.documentElement.classList.toggle("folded");
  remember("sidebar", folded ? "folded" : null);
  $(folded ? "open-sidebar" : "close-sidebar").focus();
}

/** On a narrow window the list of chats is a drawer over the page. */
export function drawer(open) {
  const was = document.documentElement.classList.contains("drawn");
  document.documentElement.classList.toggle("drawn", open && narrow());
  $("main").inert = open && narrow();
  if (was !== open && narrow()) $(open ? "close-sidebar" : "open-sidebar").focus();
  return was && !open;
}

export function focusSearch() {
  if (narrow()) drawer(true);
  document.documentElement.classList.remove("folded");
  $("search").focus();
  $("search").select();
}

/** The list as it is kept. A failure shows when something is to be kept. */
export async function refresh() {
  const mine = ++asked;
  chats.purge().catch(() => {});
  const found = await chats.list(words).catch(() => state.chats);
  if (mine !== asked) return; // a later search is on its way
  state.chats = found;
  draw();
}

function load() {
  const field = h("input", { type: "file", accept: ".json" });
  field.addEventListener("change", () => tell(async () => {
    toast(`Imported: ${await chats.importChats(await field.files[0].text())}`);
    refresh();
  }));
  field.click();
}

function group(chat) {
  const day = (time) => new Date(time).setHours(0, 0, 0, 0);
  const days = Math.round((day(Date.now()) - day(chat.updated_at)) / 86_400_000);
  return days < 1 ? "Today" : days < 2 ? "Yesterday" : days < 8 ? "Last 7 days" : days < 31 ? "Last 30 days" : "Older";
}

const titleOf = (chat) => chat.title || "New chat";

function draw() {
  // A field that somebody types a title into stays as it is; its end draws the list.
  if (renaming === null || !$("chats").querySelector(".rename")) drawList();
  $("to-corrections").toggleAttribute("aria-current", state.view === "corrections");
  const title = state.chats.find((chat) => chat.id === state.chat.id)?.title;
  document.title = state.view === "corrections" ? "Corrections · Athanor" : title ? `${title} · Athanor` : "Athanor";
}

function drawList() {
  const groups = new Map();
  for (const chat of state.chats) groups.set(group(chat), [...(groups.get(group(chat)) ?? []), chat]);
  const focused = document.activeElement?.closest?.("#chats [data-chat]")?.dataset.chat;
  const parts = [...groups].flatMap(([name, rows]) => [h("h2", {}, name), h("ul", {}, rows.map(entry))]);
  if (!state.chats.length) parts.push(h("p.muted.none", {}, words ? "Nothing found." : "Your chats will be listed here."));
  $("chats").replaceChildren(...parts);
  if (renaming) $("chats").querySelector("input")?.focus();
  else if (focused) linkOf(focused)?.focus();
}

const linkOf = (id) => $("chats").querySelector(`[data-chat="${id}"] a`);

function entry(chat) {
  const current = state.view === "chat" && chat.id === state.chat.id;
  if (renaming === chat.id) return h("li", { "data-chat": chat.id }, renameField(chat));
  const more = iconButton("more", `More for ${titleOf(chat)}`, () => openMenu(more, `Chat ${titleOf(chat)}`, [
    { label: "Rename", icon: "pen", run: () => ((renaming = chat.id), draw()) },
    ...exports(chat.id),
    { label: "Delete", icon: "trash", danger: true, run: () => remove(chat) },
  ]), { "aria-haspopup": "menu" });
  return h("li", { "data-chat": chat.id, class: current && "current" },
    h("a", { href: `#/chat/${chat.id}`, "aria-current": current && "page", title: titleOf(chat) },
      h("span.title", {}, titleOf(chat)),
      words && chat.snippet && h("span.snippet", {}, chat.snippet)),
    state.lives.has(chat.id) && h("span.dot.loading", { title: "Answering" }), more);
}

function renameField(chat) {
  const field = h("input.rename", { value: titleOf(chat), "aria-label": "Title of the chat", maxlength: "200" });
  const close = (keep) => {
    if (renaming !== chat.id) return;
    renaming = null;
    const title = field.value.trim();
    if (keep && title && title !== chat.title) {
      tell(async () => {
        const open = [state.lives.get(chat.id)?.chat, state.chat].find((one) => one?.id === chat.id);
        if (open) open.title = title;
        await chats.update(chat.id, { title }, [], open);
        await refresh();
      });
    }
    draw();
    linkOf(chat.id)?.focus();
  };
  field.addEventListener("keydown", (event) => {
    event.stopPropagation();
    if (event.key === "Enter" && !event.isComposing) close(true);
    if (event.key === "Escape") close(false);
  });
  field.addEventListener("blur", () => field.isConnected && close(true));
  setTimeout(() => field.isConnected && field.select());
  return field;
}

const exports = (id) => [["markdown", "Export as Markdown"], ["json", "Export as JSON"], ["messages", "Export for training (JSONL)"]]
  .map(([format, label]) => ({ label, icon: "download", run: () => tell(() => chats.exportChat(id, format)) }));

/** Marked first, so that it is gone after a reload too, and removed once it cannot be undone. */
function remove(chat) {
  const mark = (deleted) => tell(() => chats.update(chat.id, { deleted, updated_at: chat.updated_at })).then(refresh);
  state.lives.get(chat.id)?.aborter.abort();
  mark(Date.now());
  const timer = setTimeout(refresh, chats.UNDO_SECONDS * 1000 + 100);
  if (state.chat.id === chat.id) location.hash = "#/";
  $("search").focus();
  toast(`Deleted “${titleOf(chat)}” with its corrections`, { label: "Undo", run: () => (clearTimeout(timer), mark(null)) }, chats.UNDO_SECONDS);
}
