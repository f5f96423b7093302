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
  const said = el("p", {});
  answer.append(said);
  let request = "";
  try {
    const body = {
      model: byId("model").value,
      messages: [...talk, asked],
      max_tokens: Number(byId("most").value) || 128,
      temperature: Number(byId("temperature").value) || 0,
      stream: true,
    };
    const key = byId("api-key").value.trim();
    const response = await open("chat", { body, headers: key ? { "tandem-api-key": key } : {}, signal: running.signal });
    for await (const chunk of chunks(response.body)) {
      if (chunk.error) throw new Error(chunk.error.message);
      request = chunk.id ?? request;
      said.append(chunk.choices?.[0]?.delta?.content ?? "");
    }
    talk = [...talk, asked, { role: "assistant", content: said.textContent }];
  } catch (error) {
    answer.append(el("p", { class: "error" }, error.name === "AbortError" ? "Stopped." : error.message));
  } finally {
    running = null;
    byId("stop").disabled = true;
    byId("send").disabled = false;
  }
  if (request) await trace(request, answer);
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
