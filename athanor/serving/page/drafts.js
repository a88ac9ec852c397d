// Unsent text, by chat; kept for the tab, so that a reload loses none.

const PLACE = (id) => `athanor-draft-${id ?? "new"}`;
const texts = new Map();

export function draft(id) {
  if (!texts.has(id)) {
    let kept = null;
    try {
      kept = sessionStorage.getItem(PLACE(id));
    } catch {
      // Storage may be off.
    }
    texts.set(id, kept ?? "");
  }
  return texts.get(id);
}

export function setDraft(id, text) {
  texts.set(id, text);
  try {
    if (text) sessionStorage.setItem(PLACE(id), text);
    else sessionStorage.removeItem(PLACE(id));
  } catch {
    // Kept in memory then.
  }
}

/** A new chat has got its id; what was typed meanwhile goes with it. */
export function moveDraft(from, to) {
  setDraft(to, draft(from));
  setDraft(from, "");
}
