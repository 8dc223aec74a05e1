// The chat: a conversation that streams, and its settings.

import { connect, disconnect, find, model, request } from "./api.js";
import { watch } from "./pool.js";

const STORY = "A lighthouse keeper found a letter in a bottle, and it was addressed to her by name.";
// To click in an empty conversation: for models with a chat template, and for others to continue.
const STARTERS = {
  chat: [
    { text: "What is a KV cache? Answer in two or three sentences." },
    { text: "Write a short poem about the sea." },
    { text: `${STORY} Tell how the story goes on.`, n: 2 },
  ],
  text: [
    { text: "Once upon a time" },
    { text: "The first thing to know about computers is" },
    { text: `${STORY} It began with these words:`, n: 2 },
  ],
};
const MAX_TOKENS = 200; // of a continuation, which may have no end

const log = find("log");
let messages = []; // of the conversation, as the server gets them
let pending = []; // calls of tools that have no result yet
let running = null; // AbortController of the answer that streams
const empty = find("empty"); // what an empty conversation has; not in the document otherwise
const starters = find("starters");

// All texts are set as text, never as HTML: they come from the user and from the model.
function show(role, text) {
  const element = document.createElement("p");
  element.className = role;
  element.textContent = text;
  if (role === "message error") element.setAttribute("role", "alert");
  empty.remove();
  log.append(element);
  log.scrollTop = log.scrollHeight;
  return element;
}

function showAnswers(count) {
  return Array.from({ length: count }, (_, index) => {
    const element = show("message assistant busy", "");
    element.setAttribute("aria-busy", "true"); // screen readers wait for the complete answer
    if (count > 1) element.dataset.choice = `${index + 1} of ${count}`;
    return element;
  });
}

// Appends to the last part of an answer if it is of this kind, or begins one.
function grow(element, kind, text) {
  let part = element.lastElementChild;
  if (kind === "call" || part?.className !== kind) {
    part = document.createElement("span");
    part.className = kind;
    element.append(part);
  }
  part.append(text); // a text node
}

function showDelta(element, delta) {
  if (delta.reasoning_content) grow(element, "reasoning", delta.reasoning_content);
  if (delta.content) grow(element, "content", delta.content);
  for (const { index, function: piece, ...head } of delta.tool_calls ?? []) {
    element.calls ??= [];
    if (!element.calls[index]) {
      element.calls[index] = { ...head, function: { name: piece.name, arguments: "" } };
      grow(element, "call", "");
    }
    const call = element.calls[index].function;
    call.arguments += piece.arguments;
    element.querySelectorAll(".call")[index].textContent = `${call.name}(${call.arguments})`;
  }
}

// The complete calls of an answer.
function callsOf(element) {
  return (element.calls ?? []).filter((call) => {
    try {
      return JSON.parse(call.function.arguments);
    } catch {
      return false;
    }
  });
}

// As the server gets it; the reasoning of earlier answers is left out.
function messageOf(element) {
  const parts = [...element.querySelectorAll(".content")].map((part) => part.textContent);
  const content = parts.join("");
  const calls = callsOf(element);
  if (!calls.length) return { role: "assistant", content };
  return { role: "assistant", content: content || null, tool_calls: calls };
}

function requestOf(text, n) {
  const body = { model: model.id, n, stream: true, stream_options: { include_usage: true } };
  for (const name of ["temperature", "top_p", "max_tokens", "seed"]) {
    const value = find(name).valueAsNumber;
    if (!Number.isNaN(value)) body[name] = value;
  }
  const tools = find("tools").value.trim();
  if (find("stop").value) body.stop = find("stop").value;
  if (!model.has_chat_template) {
    const max_tokens = Math.min(MAX_TOKENS, Math.floor(model.max_model_len / 4));
    return ["v1/completions", { max_tokens, prompt: text, ...body }];
  }
  const system = find("system").value.trim();
  const first = system ? [{ role: "system", content: system }] : [];
  if (tools) body.tools = JSON.parse(tools);
  return ["v1/chat/completions", { messages: [...first, ...messages], ...body }];
}

async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.slice("data: ".length);
      if (data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

async function answer(text, n = find("n").valueAsNumber || 1) {
  const conversation = messages; // "New chat" begins another one
  const call = pending.shift();
  const result = call && { role: "tool", tool_call_id: call.id };
  messages.push({ ...(result ?? { role: "user" }), content: text });
  show("message user", text);
  if (pending.length) return; // the results of all calls go together
  const elements = showAnswers(n);
  const start = performance.now();
  let first = null;
  let usage = null;
  running = new AbortController();
  setBusy(true);
  try {
    await connect();
    const [path, body] = requestOf(text, n);
    const { signal } = running;
    const response = await request(path, { method: "POST", body: JSON.stringify(body), signal });
    for await (const event of eventsOf(response)) {
      if (event.error) throw new Error(event.error.message);
      usage = event.usage ?? usage;
      const follows = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
      for (const choice of event.choices) {
        const element = elements[choice.index];
        showDelta(element, choice.delta ?? { content: choice.text });
        if (element.textContent) first ??= performance.now();
      }
      if (follows) log.scrollTop = log.scrollHeight;
    }
  } catch (error) {
    if (error.name !== "AbortError") show("message error", error.message);
  }
  for (const element of elements) {
    element.classList.remove("busy");
    element.removeAttribute("aria-busy");
    if (!element.textContent) element.remove();
  }
  const chosen = elements.find((element) => element.textContent);
  if (chosen) {
    conversation.push(messageOf(chosen));
    if (conversation === messages) pending = callsOf(chosen);
  } else {
    conversation.pop(); // the next message would be a second one of the user
    if (call && conversation === messages) pending.unshift(call);
  }
  if (usage && first !== null) {
    const rate = usage.completion_tokens / ((performance.now() - start) / 1000);
    const cached = usage.prompt_tokens_details.cached_tokens;
    show(
      "note",
      `${usage.completion_tokens} tokens, ${rate.toFixed(0)} per second, first after ` +
        `${(first - start).toFixed(0)} ms; prompt of ${usage.prompt_tokens}, ${cached} cached`,
    );
  }
  running = null;
  setBusy(false);
}

function setBusy(busy) {
  find("send").hidden = busy;
  find("cancel").hidden = !busy;
  (busy ? find("cancel") : find("message")).focus({ preventScroll: true });
}

function showStarters() {
  if (!model.has_tokenizer) return;
  starters.replaceChildren(
    ...STARTERS[model.has_chat_template ? "chat" : "text"].map(({ text, n }) => {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = text;
      if (n > 1) button.dataset.note = `n = ${n}: the answers share the pages of the prompt`;
      button.addEventListener("click", () => running ?? answer(text, n));
      return button;
    }),
  );
}

find("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = find("message").value.trim();
  if (!text || running) return;
  find("message").value = "";
  answer(text);
});
find("message").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    find("composer").requestSubmit();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});
document.addEventListener("connected", showStarters);
find("cancel").addEventListener("click", () => running?.abort());
find("key").addEventListener("change", () => connect().catch(disconnect));
find("settings").addEventListener("submit", (event) => event.preventDefault());
find("reset").addEventListener("click", () => {
  running?.abort();
  messages = [];
  pending = [];
  log.replaceChildren(empty);
  find("message").focus();
});
find("message").focus();
connect().catch(disconnect);
watch();
