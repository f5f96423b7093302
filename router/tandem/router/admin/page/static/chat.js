// Tries the model through the API, streaming, and shows where the time of each answer went.

import { byId, el } from "./dom.js";
import { ask, open } from "./session.js";
import { makeWaterfall, setWaterfall } from "./waterfall.js";

const WAITS_MS = [50, 150, 400, 1000]; // until the router has put the request away

let talk = [];
let running = null;

export function makeChat() {
  byId("chat").addEventListener("submit", (event) => {
    event.preventDefault();
    if (running === null) send();
  });
  byId("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      byId("chat").requestSubmit();
    }
  });
  byId("stop").addEventListener("click", () => running?.abort());
  byId("anew").addEventListener("click", () => {
    running?.abort();
    talk = [];
    byId("talk").replaceChildren();
    byId("prompt").focus();
  });
}

// The models that are served, once they are known.
export function offerModels(status) {
  const names = (status?.models ?? []).flatMap((model) => model.served_names);
  const select = byId("model");
  if ([...select.options].map((option) => option.value).join("\n") === names.join("\n")) return;
  select.replaceChildren(...names.map((name) => el("option", { value: name }, name)));
}

async function send() {
  const words = byId("prompt").value.trim();
  if (!words) return;
  const asked = { role: "user", content: words };
  const answer = el("div", { class: "answer" });
  byId("talk").append(el("p", { class: "question" }, words), answer);
  byId("prompt").value = "";
  running = new AbortController();
  byId("stop").disabled = false;
  byId("send").disabled = true;
  const shown = makeAnswer(answer);
  let request = "";
  try {
    const body = bodyOf([...talk, asked]);
    const key = byId("api-key").value.trim();
    const response = await open("chat", { body, headers: key ? { "tandem-api-key": key } : {}, signal: running.signal });
    for await (const chunk of chunks(response.body)) {
      if (chunk.error) throw new Error(chunk.error.message);
      request = chunk.id ?? request;
      shown.add(chunk.choices?.[0]?.delta ?? {});
    }
    talk = [...talk, asked, { role: "assistant", content: shown.said.textContent }];
  } catch (error) {
    answer.append(el("p", { class: "error" }, error.name === "AbortError" ? "Stopped." : error.message));
  } finally {
    running = null;
    byId("stop").disabled = true;
    byId("send").disabled = false;
  }
  if (request) await trace(request, answer);
}

function bodyOf(messages) {
  const schema = json("schema", "The schema"), tools = json("tools", "The list of tools");
  const budget = byId("budget").value;
  return {
    model: byId("model").value,
    messages,
    max_tokens: Number(byId("most").value) || 128,
    temperature: Number(byId("temperature").value) || 0,
    stream: true,
    ...(schema && { response_format: { type: "json_schema", json_schema: { name: "answer", schema } } }),
    ...(tools && { tools, tool_choice: byId("must-call").checked ? "required" : "auto" }),
    ...(budget && { thinking_token_budget: Number(budget) }),
  };
}

// The value in a field; undefined where it is empty.
function json(id, what) {
  const written = byId(id).value.trim();
  if (!written) return undefined;
  try {
    return JSON.parse(written);
  } catch (error) {
    throw new Error(`${what} is not JSON: ${error.message}`);
  }
}

// An answer as it comes: thoughts and calls are folded, and there only where the model has some.
function makeAnswer(answer) {
  const said = el("p", {}), thought = el("p", {}), calls = [];
  const folded = el("details", { class: "thought" }, el("summary", {}, "Thoughts"), thought);
  answer.append(said);
  return {
    said,
    add(delta) {
      const words = delta.reasoning_content ?? delta.reasoning ?? "";
      if (words && !folded.isConnected) said.before(folded);
      thought.append(words);
      said.append(delta.content ?? "");
      for (const call of delta.tool_calls ?? []) {
        if (!calls[call.index]) {
          calls[call.index] = el("p", {});
          const name = el("summary", {}, `Calls ${call.function.name}`);
          answer.append(el("details", { class: "call" }, name, calls[call.index]));
        }
        calls[call.index].append(call.function.arguments ?? "");
      }
    },
  };
}

async function* chunks(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        const data = line.startsWith("data: ") ? line.slice(6).trim() : "";
        if (data === "[DONE]") return;
        if (data) yield JSON.parse(data);
      }
    }
  } finally {
    reader.cancel();
  }
}

async function trace(request, answer) {
  for (const waitMs of WAITS_MS) {
    await new Promise((resolve) => setTimeout(resolve, waitMs));
    try {
      const found = await ask(`requests/${encodeURIComponent(request)}`);
      if (!found.is_over && waitMs !== WAITS_MS.at(-1)) continue;
      const drawing = makeWaterfall();
      drawing.open = true;
      setWaterfall(drawing, found, Math.max(found.duration_s, 0.001));
      answer.append(drawing);
      return;
    } catch (error) {
      if (waitMs === WAITS_MS.at(-1)) answer.append(el("small", {}, error.message));
    }
  }
}
