// The messages of a chat are a tree; the shown conversation is the way from the root to the leaf.

export const byAge = (a, b) => (a.created_at < b.created_at ? -1 : 1);

/** Messages from the first one to `id`; empty for null. */
export function pathTo(chat, id) {
  const known = new Map(chat.messages.map((message) => [message.id, message]));
  const path = [];
  for (let message = known.get(id); message; message = known.get(message.parent)) path.unshift(message);
  return path;
}

/** The messages that could stand in the place of `message`, oldest first: other wordings, other answers. */
export function variants(chat, message) {
  return chat.messages.filter((other) => other.parent === message.parent && other.role === message.role)
    .sort(byAge);
}

/** The newest end of the conversations that go through `message`. */
export function newestUnder(chat, message) {
  for (;;) {
    const next = chat.messages.filter((other) => other.parent === message.id).sort(byAge).at(-1);
    if (!next) return message;
    message = next;
  }
}

/** The two answers of a comparison that nobody has picked from yet, in the order of the chat's models, or null. */
export function openComparison(chat) {
  if (chat.models.length !== 2) return null;
  const last = pathTo(chat, chat.leaf).at(-1);
  if (last?.role !== "assistant") return null;
  const all = variants(chat, last).reverse();
  const pair = chat.models.map((model) => all.find((message) => message.model === model));
  return pair[0] && pair[1] && pair[0] !== pair[1] ? pair : null;
}

/** Add messages to a chat, or replace them. */
export function put(chat, ...messages) {
  const others = chat.messages.filter(({ id }) => messages.every((message) => message.id !== id));
  chat.messages = [...others, ...messages].sort(byAge);
}
