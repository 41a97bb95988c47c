// Tiles of the present state. Each has its value and a line of its last half minute.

const WINDOW = 3; // seconds over which a rate or a mean is computed
const POINTS = 60; // values of a line, one a poll
const WIDTH = 60; // of a line's view box, as in index.html
const HEIGHT = 16;

export const whole = (number) => Math.round(number).toLocaleString("en");
export const percent = (share) =>
  share === null ? "-" : `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)}%`;
export const milliseconds = (seconds) => {
  if (seconds === null) return "-";
  const value = seconds * 1000;
  return `${value.toFixed(value < 10 ? 2 : value < 100 ? 1 : 0)} ms`;
};

export class Tiles {
  // put: writes the text of an element, by its id
  constructor(put) {
    this.put = put;
    this.reset();
  }

  reset() {
    this.samples = []; // states of the engine, the oldest about WINDOW seconds ago
    this.lines = {}; // values by tile
  }

  // engine: as /v1/graphs has it; steps: the latest ones
  show(engine, steps) {
    this.samples.push(engine);
    while (this.samples.length > 2 && this.samples[1].time < engine.time - WINDOW) this.samples.shift();
    const first = this.samples[0];
    const passed = engine.time - first.time;
    const rate = (name) => (passed > 0 ? (engine[name] - first[name]) / passed : 0);
    const share = (part, all) => (all > 0 ? part / all : null);
    const mean = (name) =>
      share(engine[name].seconds - first[name].seconds, engine[name].count - first[name].count);
    const total = (name) => steps.reduce((sum, step) => sum + step[name], 0);
    const times = steps.map((step) => step.seconds).sort((one, other) => one - other);

    this.tile("output-rate", rate("generation_tokens"), whole);
    this.tile("prompt-rate", rate("prompt_tokens"), whole);
    this.tile("first-token", mean("first_token"), milliseconds);
    this.tile("inter-token", mean("inter_token"), milliseconds);
    this.tile("running", engine.running, (count) => `${whole(count)} of ${whole(engine.max_num_seqs)}`, engine.max_num_seqs);
    this.tile("waiting", engine.waiting, whole);
    this.tile("kv", share(engine.kv_blocks_used, engine.kv_blocks), percent, 1);
    const queries = engine.prefix_queries - first.prefix_queries;
    this.tile("prefix", share(engine.prefix_hits - first.prefix_hits, queries), percent, 1);
    this.tile("step-time", times.length ? times[times.length >> 1] : null, milliseconds);
    this.tile("padding", share(total("padded_tokens"), total("graph_tokens")), percent, 1);
    const { refused, failed } = engine.errors;
    this.tile("errors", refused + failed, () => `${whole(refused)}, ${whole(failed)}`);
    this.tile("preemptions", engine.preemptions, whole);
  }

  // A value of null means that nothing was measured in the window: the one before stays. `most` is the top of the line;
  // without it the top is the largest value that the line shows.
  tile(name, value, text, most) {
    const before = this.lines[name] ?? [];
    const values = [...before, value ?? before.at(-1) ?? null].slice(-POINTS);
    this.lines[name] = values;
    this.put(name, values.at(-1) === null ? "-" : text(values.at(-1)));
    const top = most ?? (Math.max(...values) || 1);
    const places = values.map((one, place) => [WIDTH - values.length + place + 0.5, one]);
    const points = places.filter(([, one]) => one !== null).map(([x, one]) => `${x},${HEIGHT - 1 - (HEIGHT - 2) * (one / top)}`);
    document.querySelector(`#${name} + svg polyline`).setAttribute("points", points.join(" "));
  }
}
