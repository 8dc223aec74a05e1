// The view of the engine: its pool, one cell a page, and its speed. Nothing is asked while the view
// is closed or the tab is hidden.

import { connect, disconnect, find, request } from "./api.js";

const POLL_MS = 250;
const RETRY_MS = 2000;
const POLLS_PER_METRICS = 4;
const SECONDS_OF_CHART = 60;
const CELL = { largest: 20, smallest: 4, gap: 1 }; // pixels
const MAX_HEIGHT = { narrow: 120, wide: 240 };
const REPLICA_GAP = 8;
const STATES = ["used", "shared", "cached", "free"];
const NUM_COLOURS = 24; // of 8 hues; more requests at a time share them
const MAX_CHIPS = 8;

const dark = matchMedia("(prefers-color-scheme: dark)");
const narrow = matchMedia("(max-width: 50rem)"); // as in page.css
const colours = new Map(); // of requests, by number
let nextColour = 0;
const rates = [];
let last = null; // {time, tokens} of the newest metrics

function colour(number) {
  const index = colours.get(number);
  const lightness = (dark.matches ? [60, 78, 42] : [48, 68, 32])[Math.floor(index / 8)];
  return `hsl(${(210 + 135 * (index % 8)) % 360} 85% ${lightness}%)`;
}

// A request keeps its colour. A new one gets the next that no other has.
function assignColours(numbers) {
  for (const number of colours.keys()) if (!numbers.includes(number)) colours.delete(number);
  const step = () => (nextColour = (nextColour + 1) % NUM_COLOURS);
  for (const number of numbers.filter((one) => !colours.has(one))) {
    const used = new Set(colours.values());
    while (used.size < NUM_COLOURS && used.has(nextColour)) step();
    colours.set(number, nextColour);
    step();
  }
}

function showPool({ page_size, pages_per_cell, replicas }) {
  const owners = replicas.map(({ runs }) =>
    runs.flatMap(([owner, count]) => Array(count).fill(owner)),
  );
  const numbers = [...new Set(owners.flat())].filter(Number.isInteger).sort((a, b) => a - b);
  assignColours(numbers);
  drawMap(owners, replicas.map(({ num_tokens }) => num_tokens), page_size);
  const sum = (values) => values.reduce((a, b) => a + b, 0);
  const total = sum(replicas.map(({ num_pages }) => num_pages));
  const counts = STATES.map((state) => sum(replicas.map((one) => one.counts[state])));
  STATES.forEach((state, index) => (find(state).textContent = counts[index]));
  const texts = STATES.map((state, index) => `${counts[index]} ${state}`);
  find("map").setAttribute("aria-label", `Of ${total} pages: ${texts.join(", ")}`);
  const many = replicas.length > 1 ? ` in ${replicas.length} replicas` : "";
  const scale = pages_per_cell > 1 ? `${pages_per_cell} pages` : "1 page";
  find("scale").textContent = `${total} pages of ${page_size} tokens${many}; 1 cell = ${scale}`;
  const chips = numbers.slice(0, MAX_CHIPS).map((number) => chip(number, colour(number)));
  if (numbers.length > MAX_CHIPS) chips.push(chip(`and ${numbers.length - MAX_CHIPS} more`));
  find("requests").replaceChildren(...(numbers.length ? chips : [chip("none")]));
}

function chip(text, background = "none") {
  const element = document.createElement("li");
  element.textContent = text;
  element.style.setProperty("--colour", background);
  return element;
}

function drawMap(owners, numTokens, pageSize) {
  const canvas = find("map");
  const width = canvas.clientWidth;
  if (!width) return; // the view was closed meanwhile
  const most = narrow.matches ? MAX_HEIGHT.narrow : MAX_HEIGHT.wide;
  let size = CELL.largest;
  const columns = () => Math.max(1, Math.floor(width / size));
  const rows = () => owners.map((cells) => Math.ceil(cells.length / columns()));
  const height = () => rows().reduce((a, b) => a + b * size + REPLICA_GAP, -REPLICA_GAP);
  while (size > CELL.smallest && height() > most) size -= 1;

  const scale = window.devicePixelRatio;
  canvas.style.height = `${height()}px`;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height() * scale);
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  const style = getComputedStyle(canvas);
  const side = size - CELL.gap;
  let top = 0;
  owners.forEach((cells, replica) => {
    cells.forEach((owner, index) => {
      const x = (index % columns()) * size;
      const y = top + Math.floor(index / columns()) * size;
      const isState = STATES.includes(owner);
      context.fillStyle = isState ? style.getPropertyValue(`--${owner}`) : colour(owner);
      const filled = (numTokens[replica][index] ?? pageSize) / pageSize;
      context.globalAlpha = filled < 1 ? 0.3 : 1; // a page that fills, from below
      context.fillRect(x, y, side, side);
      context.globalAlpha = 1;
      if (filled < 1) context.fillRect(x, y + side * (1 - filled), side, side * filled);
    });
    top += rows()[replica] * size + REPLICA_GAP;
  });
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
  find("running").textContent = values.num_requests_running;
  find("waiting").textContent = values.num_requests_waiting;
  const share = values.prefix_cache_hits_total / values.prefix_cache_queries_total;
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

const isViewed = () => find("pool").open && !document.hidden;
let isPolling = false;

async function poll() {
  if (isPolling) return;
  isPolling = true;
  last = null; // a rate needs two metrics of this watch
  for (let turn = 0; isViewed(); turn += 1) {
    let pause = POLL_MS;
    try {
      await connect();
      showPool(await (await request("pool")).json());
      if (turn % POLLS_PER_METRICS === 0) {
        showMetrics(parseMetrics(await (await request("metrics")).text()));
      }
    } catch (error) {
      disconnect(error);
      [last, pause] = [null, RETRY_MS];
    }
    await new Promise((resolve) => setTimeout(resolve, pause));
  }
  isPolling = false;
}

export function watch() {
  find("pool").open = !narrow.matches;
  find("pool").addEventListener("toggle", poll);
  document.addEventListener("visibilitychange", poll);
  poll();
}
