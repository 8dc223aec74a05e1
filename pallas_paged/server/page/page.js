"use strict";

const SECONDS_OF_CHART = 60;
const POLL_MS = 1000;

const find = (id) => document.getElementById(id);
let messages = []; // of the conversation, as the server gets them
const rates = [];
let model = null; // as /v1/models has it
let running = null; // AbortController of the answer that streams
let last = null; // {time, tokens} of the newest metrics

function headers() {
  const key = find("key").value;
  return { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
}

async function errorOf(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `status ${response.status}`;
  }
}

// All texts are set as text, never as HTML: they come from the user and from the model.
function show(role, text) {
  const element = document.createElement("p");
  element.className = `message ${role}`;
  element.textContent = text;
  if (role === "error") element.setAttribute("role", "alert");
  find("log").append(element);
  element.scrollIntoView({ block: "end" });
  return element;
}

function note(text) {
  const element = document.createElement("p");
  element.className = "note";
  element.textContent = text;
  find("log").append(element);
  element.scrollIntoView({ block: "end" });
}

async function connect() {
  const response = await fetch("v1/models", { headers: headers() });
  if (!response.ok) throw new Error(await errorOf(response));
  [model] = (await response.json()).data;
  const kind = model.has_chat_template ? "" : ", without a chat template: it continues your text";
  find("model").textContent = `${model.id}, ${model.max_model_len} tokens of context${kind}`;
}

function requestOf(text) {
  const body = { model: model.id, stream: true, stream_options: { include_usage: true } };
  for (const name of ["temperature", "top_p", "max_tokens", "seed"]) {
    const value = find(name).valueAsNumber;
    if (!Number.isNaN(value)) body[name] = value;
  }
  if (!model.has_chat_template) return ["v1/completions", { max_tokens: 200, prompt: text, ...body }];
  const system = find("system").value.trim();
  const first = system ? [{ role: "system", content: system }] : [];
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

async function answer(text) {
  const conversation = messages; // "New chat" begins another one
  messages.push({ role: "user", content: text });
  show("user", text);
  const element = show("assistant busy", "");
  element.setAttribute("aria-busy", "true"); // screen readers wait for the whole answer
  const start = performance.now();
  let first = null;
  let usage = null;
  let content = "";
  running = new AbortController();
  setBusy(true);
  try {
    if (model === null) await connect();
    const [path, body] = requestOf(text);
    const response = await fetch(path, {
      method: "POST",
      headers: headers(),
      body: JSON.stringify(body),
      signal: running.signal,
    });
    if (!response.ok) throw new Error(await errorOf(response));
    const log = find("log");
    for await (const event of eventsOf(response)) {
      if (event.error) throw new Error(event.error.message);
      usage = event.usage ?? usage;
      const choice = event.choices[0];
      const piece = choice?.delta?.content ?? choice?.text ?? "";
      if (!piece) continue;
      first ??= performance.now();
      const follows = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
      content += piece;
      element.append(piece); // a text node
      if (follows) log.scrollTop = log.scrollHeight;
    }
  } catch (error) {
    if (error.name !== "AbortError") show("error", error.message);
  }
  element.classList.remove("busy");
  element.removeAttribute("aria-busy");
  if (content) conversation.push({ role: "assistant", content });
  else {
    element.remove();
    conversation.pop(); // the next message would be a second one of the user
  }
  if (usage && first !== null) {
    const rate = usage.completion_tokens / ((performance.now() - start) / 1000);
    const cached = usage.prompt_tokens_details.cached_tokens;
    note(
      `${usage.completion_tokens} tokens, ${rate.toFixed(0)} per second, first after ` +
        `${(first - start).toFixed(0)} ms; prompt of ${usage.prompt_tokens}, ${cached} cached`,
    );
  }
  running = null;
  setBusy(false);
}

function setBusy(busy) {
  find("send").hidden = busy;
  find("stop").hidden = !busy;
  (busy ? find("stop") : find("message")).focus();
}

// Values of the metrics without labels other than the model's name.
function parseMetrics(text) {
  const values = {};
  for (const line of text.split("\n")) {
    const match = /^pallas_paged:(\w+)\{model_name="(?:[^"\\]|\\.)*"\} (\S+)$/.exec(line);
    if (match) values[match[1]] = Number(match[2]);
  }
  return values;
}

function showMetrics(values) {
  const total = values.num_kv_cache_pages;
  const counts = {
    shared: values.num_shared_pages,
    used: Math.max(0, values.num_used_pages - values.num_shared_pages),
    cached: values.num_cached_pages,
  };
  for (const [name, count] of Object.entries(counts)) {
    find(name).textContent = count;
    find(`bar-${name}`).style.width = `${(100 * count) / total}%`;
  }
  find("free").textContent = `${values.num_free_pages} of ${total}`;
  find("bar").setAttribute(
    "aria-label",
    `Of ${total} pages ${counts.shared} are shared, ${counts.used} others in use, ` +
      `${counts.cached} cached`,
  );
  find("running").textContent = values.num_requests_running;
  find("waiting").textContent = values.num_requests_waiting;
  const share = values.prefix_cache_hits_total / values.prompt_tokens_total;
  find("hits").textContent = Number.isNaN(share) ? "-" : `${(100 * share).toFixed(0)}%`;

  const now = { time: performance.now(), tokens: values.generation_tokens_total };
  if (last !== null) {
    const rate = (1000 * (now.tokens - last.tokens)) / (now.time - last.time);
    rates.push(rate);
    if (rates.length > SECONDS_OF_CHART) rates.shift();
    find("rate").textContent = rate.toFixed(0);
    const most = Math.max(1, ...rates);
    const start = SECONDS_OF_CHART - rates.length;
    const points = rates.map((one, index) => `${start + index},${19 - (18 * one) / most}`);
    find("line").setAttribute("points", points.join(" "));
  }
  last = now;
}

async function poll() {
  if (!document.hidden) {
    try {
      if (model === null) await connect();
      const response = await fetch("metrics", { headers: headers() });
      if (!response.ok) throw new Error(await errorOf(response));
      showMetrics(parseMetrics(await response.text()));
    } catch (error) {
      model = null;
      last = null;
      find("model").textContent = error.message;
    }
  }
  setTimeout(poll, POLL_MS);
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
find("stop").addEventListener("click", () => running?.abort());
find("settings").addEventListener("submit", (event) => event.preventDefault());
find("reset").addEventListener("click", () => {
  running?.abort();
  messages = [];
  find("log").replaceChildren();
  find("message").focus();
});
find("message").focus();
poll();
