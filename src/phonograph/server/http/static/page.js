// Polls /v1/graphs twice a second while the page is visible, and shows the new steps.

import { Picture } from "./picture.js";
import { Tiles, milliseconds, percent, whole } from "./tiles.js";

const EVERY = 500; // milliseconds
const KEPT = 240; // steps
const LISTED = 12;

const id = (name) => document.getElementById(name);
const put = (name, text) => {
  const node = id(name);
  if (node.textContent !== text) node.textContent = text;
};
const plural = (count, word) => `${whole(count)} ${word}${count === 1 ? "" : "s"}`;

let steps = [];
let key = sessionStorage.getItem("phonograph-key");
let paused = false;
let timer = null;
let turns = 0; // number of polls; the answer to an earlier poll is dropped

const picture = new Picture(id("picture"), showChosen);
const tiles = new Tiles(put);

async function poll() {
  clearTimeout(timer);
  const turn = ++turns;
  try {
    const newest = steps.at(-1)?.number ?? 0;
    const headers = key ? { authorization: `Bearer ${key}` } : {};
    const answer = await fetch(`v1/graphs?last=${KEPT}&after=${newest}`, { headers, cache: "no-store" });
    const news = answer.ok ? await answer.json() : null;
    if (turn !== turns) return;
    if (answer.status === 401) {
      id("key").hidden = false;
      return state("waiting", "An API key is needed");
    }
    if (!news) throw new Error(`the server answers ${answer.status}`);
    id("key").hidden = true;
    if (news.num_steps < newest) {
      // The server was restarted: its step numbers begin again.
      steps = [];
      tiles.reset();
      timer = setTimeout(poll, 0);
      return;
    }
    show(news);
  } catch (error) {
    if (turn !== turns) return;
    state("down", `No answer: ${error.message}`);
  }
  if (!document.hidden) timer = setTimeout(poll, EVERY);
}

function state(name, text) {
  id("state").dataset.state = name;
  put("state", text);
}

function show(news) {
  const { engine } = news;
  state(engine.up ? "live" : "down", engine.up ? "Live" : "The engine has stopped");
  put("what", `${news.model} · ${news.device} · ${news.attention_backend}`);
  steps = steps.concat(news.steps).slice(-KEPT);
  tiles.show(engine, steps);
  showDecisions(news.decisions);
  showResolution(news);
  rows("list", steps.slice(-LISTED).reverse(), (step) => [
    number(whole(step.number), "step"),
    batch(step),
    modeMark(step.mode, graphName(step)),
    number(whole(step.padded_tokens), "padding"),
    number(milliseconds(step.seconds), "time"),
    reason(step.reason),
  ]);
  picture.show(steps);
}

function showDecisions(decisions) {
  const total = decisions.reduce((sum, one) => sum + one.steps, 0);
  const outside = decisions.filter((one) => one.mode !== "FULL").reduce((sum, one) => sum + one.steps, 0);
  if (total) {
    put(
      "verdict",
      outside
        ? `${whole(outside)} of ${plural(total, "step")} did not replay a whole graph. The rows marked below say why.`
        : `Every step replayed one whole graph: ${whole(total)} so far.`,
    );
  }
  // Steps without a whole graph come first.
  const rank = (one) => ["NONE", "PIECEWISE", "FULL"].indexOf(one.mode);
  const sorted = [...decisions].sort((one, other) => rank(one) - rank(other) || other.steps - one.steps);
  rows("decisions", sorted, (one) => [
    modeMark(one.mode, one.mode === "NONE" ? "no graph" : one.mode),
    one.kind,
    reason(one.cause),
    number(whole(one.steps), "steps"),
    number(percent(one.padded_tokens / (one.padded_tokens + one.tokens)), "padding"),
    number(milliseconds(one.seconds / one.steps), "mean time"),
  ]);
}

function showResolution({ resolution, support, captures, notes }) {
  put("mode", resolution.mode);
  items("resolution", resolution.reasons.map((one) => {
    const change = one.from && one.from !== one.to ? `${one.from} → ${one.to}` : one.to;
    return `${change}: ${one.why}`;
  }));
  // Most chains of reasons include the support's reason.
  const isIncluded = resolution.reasons.some((one) => one.why.includes(support.reason));
  put("support", isIncluded ? "" : `The backend supports ${support.level}: ${support.reason}`);
  items("notes", notes);
  const megabytes = (captures.memory_bytes / 2 ** 20).toFixed(1);
  const count = captures.graphs.length;
  put("graphs-summary", `${plural(count, "graph")}, ${megabytes} MiB, captured in ${captures.seconds.toFixed(1)} s`);
  const sets = [...new Set(captures.graphs.map((graph) => graph.set))];
  const nodes = sets.flatMap((set) => [
    element("dt", `${set}, tokens`),
    element("dd", captures.graphs.filter((graph) => graph.set === set).map((graph) => graph.tokens).join(", ")),
  ]);
  id("captures").replaceChildren(...nodes);
}

function showChosen(step) {
  if (!step) return;
  put(
    "chosen-what",
    `Step ${whole(step.number)}: ${batch(step)} in ${graphName(step)}, ` +
      `${step.padded_tokens ? `${plural(step.padded_tokens, "token")} of padding` : "no padding"}, ` +
      milliseconds(step.seconds),
  );
  put("chosen-why", step.reason);
}

function batch(step) {
  const parts = [];
  if (step.decodes) parts.push(plural(step.decodes, "decode"));
  if (step.prefills.length) {
    const most = step.prefills.slice(0, 4).map(whole).join(" + ") + (step.prefills.length > 4 ? " + ..." : "");
    parts.push(`${plural(step.prefills.length, "prefill")} of ${most} tokens`);
  }
  return parts.join(", ");
}

const graphName = (step) =>
  step.mode === "NONE"
    ? "no graph"
    : `${step.graph} graph of ${plural(step.graph_tokens, "token")}, ${plural(step.graph_slots, "slot")}`;

// -- nodes: text only, never markup -----------------------------------------------------------------------------------

function element(name, content, className = "") {
  const node = document.createElement(name);
  node.append(content);
  if (className) node.className = className;
  return node;
}

const number = (text, label) => ({ text, className: "n", label });
const reason = (text) => ({ text, className: "reason" });
const modeMark = (mode, text) => ({ text, className: "mode", mode });

function rows(body, values, cells) {
  const made = values.map((value) => {
    const row = document.createElement("tr");
    for (const cell of cells(value)) {
      const node = element("td", cell.text ?? cell, cell.className);
      if (cell.mode) node.dataset.mode = cell.mode;
      if (cell.label) node.dataset.label = cell.label;
      row.append(node);
    }
    return row;
  });
  id(body).replaceChildren(...made);
}

function items(list, texts) {
  const node = id(list);
  const shown = [...node.children].map((child) => child.textContent);
  if (shown.join("\n") !== texts.join("\n")) node.replaceChildren(...texts.map((text) => element("li", text)));
}

id("pause").addEventListener("click", () => {
  paused = !paused;
  clearTimeout(timer);
  turns += 1;
  put("pause", paused ? "Go on" : "Pause");
  id("pause").setAttribute("aria-pressed", String(paused));
  if (paused) state("waiting", "Paused");
  else poll();
});
id("key").addEventListener("submit", (event) => {
  event.preventDefault();
  key = id("key-value").value;
  sessionStorage.setItem("phonograph-key", key);
  poll();
});
document.addEventListener("visibilitychange", () => document.hidden || paused || poll());
poll();
