// Steps as columns of decode, prefill and padding tokens; a strip below shows the mode.

const COLUMN = 7; // CSS pixels, with the gap
const GAP = 1;
const STRIP = 8; // height of the strip that shows the mode
const LEFT = 40; // room for the numbers of the scale

export class Picture {
  // steps: as /v1/graphs has them, oldest first; the last ones that fit are shown.
  constructor(canvas, onChoose) {
    this.canvas = canvas;
    this.onChoose = onChoose;
    this.steps = [];
    this.chosen = null; // number of a step, or null for the newest
    canvas.addEventListener("pointermove", (event) => event.pointerType === "mouse" && this.point(event));
    canvas.addEventListener("pointerdown", (event) => this.point(event));
    canvas.addEventListener("pointerleave", () => this.choose(null));
    canvas.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.draw()).observe(canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  get room() {
    return Math.max(1, Math.floor((this.canvas.clientWidth - LEFT) / COLUMN));
  }

  get shown() {
    return this.steps.slice(-this.room);
  }

  show(steps) {
    this.steps = steps;
    this.draw();
  }

  point(event) {
    const place = Math.floor((event.offsetX - LEFT) / COLUMN);
    const step = this.shown[place];
    if (step) this.choose(step.number);
  }

  key(event) {
    const shown = this.shown;
    if (event.key === "Escape") return this.choose(null);
    const move = { ArrowLeft: -1, ArrowRight: 1, Home: -shown.length, End: shown.length }[event.key];
    if (!move || !shown.length) return;
    event.preventDefault();
    const now = shown.findIndex((step) => step.number === this.chosen);
    const next = (now < 0 ? shown.length - 1 : now) + move;
    this.choose(shown[Math.min(shown.length - 1, Math.max(0, next))].number);
  }

  choose(number) {
    this.chosen = number;
    this.draw();
  }

  draw() {
    const { canvas } = this;
    const scale = window.devicePixelRatio || 1;
    const width = canvas.clientWidth;
    const height = canvas.clientHeight;
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    const to = canvas.getContext("2d");
    to.scale(scale, scale);
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(`--${name}`).trim();
    const shown = this.shown;
    const floor = height - STRIP - 4;
    const most = Math.max(4, ...shown.map((step) => step.graph_tokens));
    // Square root scale: a decode of one token stays visible beside a prompt of hundreds.
    const y = (tokens) => floor - (floor - 10) * Math.sqrt(tokens / most);
    this.ruler(to, y, most, width, colour);
    const hatch = hatching(to, colour("padding"), scale);
    shown.forEach((step, place) => {
      const x = LEFT + place * COLUMN;
      const wide = COLUMN - GAP;
      const bar = (from, until, fill) => {
        to.fillStyle = fill;
        to.fillRect(x, y(until), wide, y(from) - y(until));
      };
      bar(0, step.decodes, colour("decode"));
      bar(step.decodes, step.tokens, colour("prefill"));
      bar(step.tokens, step.graph_tokens, hatch);
      to.fillStyle = colour({ FULL: "full", PIECEWISE: "piecewise" }[step.mode] ?? "eager");
      // A split strip is a mixed graph, a solid one a decode graph.
      to.fillRect(x, floor + 4, wide, STRIP);
      if (step.mode === "FULL" && step.graph.includes("mixed")) to.clearRect(x, floor + 7, wide, 2);
      if (step.number === this.chosen) {
        to.strokeStyle = colour("ink");
        to.strokeRect(x - 0.5, 4.5, wide + 1, height - 5);
      }
    });
    this.onChoose(shown.find((step) => step.number === this.chosen) ?? shown.at(-1));
  }

  ruler(to, y, most, width, colour) {
    to.font = "11px system-ui, sans-serif";
    to.textAlign = "right";
    to.textBaseline = "middle";
    // Powers of four, each at half the height of the next, and the largest step.
    const power = Math.floor(Math.log(most) / Math.log(4) + 1e-9);
    const marks = [power - 2, power - 1, power].filter((one) => one >= 0).map((one) => 4 ** one);
    for (const tokens of [0, ...marks.filter((one) => one < 0.7 * most), most]) {
      const line = Math.round(y(tokens)) + 0.5;
      to.strokeStyle = colour("line");
      to.beginPath();
      to.moveTo(LEFT - 4, line);
      to.lineTo(width, line);
      to.stroke();
      to.fillStyle = colour("soft");
      to.fillText(tokens.toLocaleString("en"), LEFT - 8, line);
    }
  }
}

function hatching(to, colour, scale) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 4 * scale;
  const on = tile.getContext("2d");
  on.scale(scale, scale);
  on.strokeStyle = colour;
  on.beginPath();
  on.moveTo(-1, 5);
  on.lineTo(5, -1);
  on.stroke();
  const pattern = to.createPattern(tile, "repeat");
  pattern.setTransform(new DOMMatrix().scale(1 / scale));
  return pattern;
}
