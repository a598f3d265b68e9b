// What the page asks of the server: OpenAI's API with the fields `speculation`, `max_tree_nodes`
// and `rounds`. Failures become sentences.

/** An error whose message is meant for the reader. */
export class Trouble extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

function headers(key) {
  const all = { "Content-Type": "application/json" };
  if (key) all.Authorization = `Bearer ${key}`;
  return all;
}

async function ask(path, options) {
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Trouble("The server cannot be reached. Is it running?");
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

async function refusal(response) {
  const { status } = response;
  if (status === 401) {
    return new Trouble("The server asks for an API key: enter it under Parameters.", status);
  }
  if (status === 429) {
    const wait = Number(response.headers.get("Retry-After"));
    const when = wait > 0 ? `in ${wait} ${wait === 1 ? "second" : "seconds"}` : "in a moment";
    return new Trouble(`The server is busy. Try again ${when}.`, status);
  }
  const said = saidBy(await response.json().catch(() => null));
  if (status >= 500) return new Trouble(`The server failed${said ? `: ${said}` : "."}`, status);
  return new Trouble(said || `The server refused the request (${status}).`, status);
}

function saidBy(body) {
  const said = body?.error?.message ?? body?.error ?? body?.message ?? body?.detail;
  return typeof said === "string" ? said : said ? JSON.stringify(said) : "";
}

/** Name of the server's model. */
export async function modelName(key) {
  const body = await (await ask("v1/models", { headers: headers(key) })).json();
  const first = body.data?.[0]?.id;
  if (!first) throw new Trouble("The server has no model.");
  return first;
}

/** Asks for an answer; `onChunk` gets each chunk as it comes. */
export async function streamChat(body, { key, signal, onChunk }) {
  const response = await ask("v1/chat/completions", {
    method: "POST", headers: headers(key), body: JSON.stringify(body), signal,
  });
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Trouble(`The answer broke off: ${saidBy(chunk)}`);
    onChunk(chunk);
  }
  throw new Trouble("The connection broke off. What had come is kept.");
}

/** The `data` of each server-sent event. */
async function* events(stream) {
  const reader = stream.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read().catch((error) => {
        if (error.name === "AbortError") throw error;
        return { done: true };
      });
      if (done) return;
      const lines = (rest + decoder.decode(value, { stream: true })).split(/\r\n|\n|\r/);
      rest = lines.pop();
      for (const line of lines) if (line.startsWith("data:")) yield line.slice(5).trim();
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
