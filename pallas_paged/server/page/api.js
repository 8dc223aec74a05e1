// Requests to the server, and what it says of its model.

export const find = (id) => document.getElementById(id);

export let model = null; // as /v1/models has it; null: not known yet, or any more
let connecting = null; // the answer that is waited for

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

export async function request(path, options = {}) {
  const response = await fetch(path, { headers: headers(), ...options });
  if (!response.ok) throw new Error(await errorOf(response));
  return response;
}

async function askForModel() {
  [model] = (await (await request("v1/models")).json()).data;
  let kind = model.has_chat_template ? "" : ", without a chat template: it continues your text";
  if (!model.has_tokenizer) kind = ", without a tokenizer: it takes no texts";
  find("model").textContent = `${model.id}, ${model.max_model_len} tokens of context${kind}`;
  document.dispatchEvent(new Event("connected"));
}

export async function connect() {
  if (model !== null) return;
  connecting ??= askForModel();
  try {
    await connecting;
  } finally {
    connecting = null;
  }
}

export function disconnect(error) {
  model = null;
  find("model").textContent = error.message;
}
