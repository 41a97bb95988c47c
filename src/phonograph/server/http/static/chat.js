// The chat: a conversation with the model, streamed from /v1/chat/completions. It is kept until the page is left.

import { whole } from "./tiles.js";

const id = (name) => document.getElementById(name);
const GRAPHS = { FULL: "in whole graphs", PIECEWISE: "in pieces", NONE: "without a graph" };

let messages = [];
let pending = []; // calls of the last answer whose results are missing
let running = null; // stops the answer in progress

const headers = () => {
  const key = sessionStorage.getItem("phonograph-key");
  return { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) };
};

// One turn on the page. Texts grow in text nodes, never as markup.
class Turn {
  constructor(role) {
    this.node = document.createElement("div");
    this.node.className = "turn";
    this.node.dataset.role = role;
    this.parts = new Map();
    id("turns").append(this.node);
  }

  // Append text to a part, which is made at its first text.
  write(name, text, tag = "p", label = "") {
    if (!this.parts.has(name)) {
      const part = document.createElement(tag);
      part.className = name.replace(/\d+$/, "");
      if (label) part.append(this.label(tag, label));
      const content = document.createTextNode("");
      part.append(content);
      this.node.append(part);
      this.parts.set(name, content);
    }
    this.parts.get(name).appendData(text);
    this.node.scrollIntoView({ block: "end" });
  }

  label(tag, text) {
    const label = document.createElement(tag === "details" ? "summary" : "b");
    label.append(text);
    return label;
  }
}

// Add one result of a call, or a message of the user; return whether the model is to answer.
function take(text) {
  const call = pending.shift();
  messages.push(call ? { role: "tool", tool_call_id: call.id, content: text } : { role: "user", content: text });
  new Turn(call ? "tool" : "user").write("text", text);
  ask();
  return !pending.length;
}

function ask() {
  id("question").placeholder = pending.length ? `Result of ${pending[0].function.name}` : "Message";
}

async function answer() {
  const turn = new Turn("assistant");
  const conversation = messages; // a new chat may begin meanwhile
  const message = { role: "assistant", content: "" };
  running = new AbortController();
  id("send").textContent = "Stop";
  const began = performance.now();
  const before = await decisions();
  let usage = null;
  try {
    const tools = id("tools").value.trim() ? { tools: JSON.parse(id("tools").value) } : {};
    const body = JSON.stringify({ messages: conversation, ...tools, stream: true, stream_options: { include_usage: true } });
    const { signal } = running;
    const found = await fetch("v1/chat/completions", { method: "POST", headers: headers(), body, signal });
    if (!found.ok) throw new Error((await found.json()).error.message);
    for await (const event of events(found.body)) {
      if (event.error) throw new Error(event.error.message);
      usage = event.usage ?? usage;
      if (event.choices.length) read(event.choices[0], turn, message);
    }
  } catch (error) {
    if (error.name !== "AbortError") turn.write("problem", `No answer: ${error.message}`);
  }
  running = null;
  id("send").textContent = "Send";
  const seconds = (performance.now() - began) / 1000;
  const spent = usage ? `${whole(usage.completion_tokens)} tokens in ${seconds.toFixed(2)} s` : "Stopped";
  turn.write("soft", `${spent}. Steps of the engine meanwhile: ${replayed(before, await decisions())}.`);
  if (message.content || message.tool_calls) conversation.push(message);
  // A message without an answer is not sent again.
  else while (conversation.at(-1)?.role === "user") conversation.pop();
  if (conversation !== messages) return;
  pending = [...(message.tool_calls ?? [])];
  ask();
}

async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (let { value, done } = await reader.read(); !done; { value, done } = await reader.read()) {
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data: {")) yield JSON.parse(line.slice(6));
  }
}

function read({ delta, finish_reason: reason }, turn, message) {
  const thought = delta.reasoning ?? delta.reasoning_content;
  if (thought) turn.write("thinking", thought, "details", "Thinking");
  if (delta.content) {
    message.content += delta.content;
    turn.write("text", delta.content);
  }
  for (const part of delta.tool_calls ?? []) {
    message.tool_calls ??= [];
    const call = (message.tool_calls[part.index] ??= { type: "function", function: { name: "", arguments: "" } });
    call.id ??= part.id;
    call.function.name += part.function.name ?? "";
    call.function.arguments += part.function.arguments ?? "";
    turn.write(`call${part.index}`, part.function.arguments ?? "", "pre", `${call.function.name} `);
  }
  if (reason === "length") turn.write("problem", "Cut at the maximum of tokens.");
}

async function decisions() {
  const found = await fetch("v1/graphs?last=0", { headers: headers(), cache: "no-store" }).catch(() => null);
  return found?.ok ? (await found.json()).decisions : [];
}

// What ran between two looks at the counts, with the reason of steps without a whole graph.
function replayed(before, after) {
  const name = (one) => [one.mode, one.kind, one.cause].join();
  const counts = new Map(before.map((one) => [name(one), one.steps]));
  const found = after.map((one) => ({ ...one, steps: one.steps - (counts.get(name(one)) ?? 0) }));
  const shown = found.filter((one) => one.steps).map((one) => {
    const why = one.mode === "FULL" ? "" : ` (${one.cause})`;
    return `${whole(one.steps)} ${one.kind} ${GRAPHS[one.mode]}${why}`;
  });
  return shown.join(", ") || "none";
}

function view() {
  const chat = location.hash === "#chat";
  id("steps-view").hidden = chat;
  id("chat-view").hidden = !chat;
  for (const link of id("views").children) {
    if ((link.hash === "#chat") === chat) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
}

id("chat").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running) return running.abort();
  const text = id("question").value;
  if (!text.trim()) return;
  id("question").value = "";
  if (take(text)) answer();
});
id("question").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  if (!running) id("chat").requestSubmit();
});
id("clear").addEventListener("click", () => {
  running?.abort();
  messages = [];
  pending = [];
  id("turns").replaceChildren();
  ask();
});
addEventListener("hashchange", view);
view();
