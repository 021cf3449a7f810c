// Hand-written line charts: a few SVG elements, with colours from the style sheet.

const NS = "http://www.w3.org/2000/svg";
const WIDTH = 500, HEIGHT = 150, LEFT = 52, RIGHT = 8, TOP = 8, BOTTOM = 20;

// series: [{name, colour, values: [number or null, oldest first]}]; all of one length
export function lineChart(title, describe) {
  const card = element("div", "card");
  card.append(element("h2", "", title));
  const svg = card.appendChild(svgElement("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": title }));
  const legend = card.appendChild(element("ul", "legend"));
  return {
    card,
    draw(series, numSlots, lowest, highest, seconds) {
      const known = series.flatMap((line) => line.values.filter((value) => value !== null));
      const top = highest ?? roundUp(Math.max(...known, 0));
      svg.replaceChildren(...axes(lowest, top, describe, seconds));
      for (const line of series) svg.append(...curves(line, numSlots, lowest, top));
      legend.replaceChildren(...series.map((line) => legendItem(line, describe)));
    },
  };
}

export function element(name, className = "", text = "") {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text) made.textContent = text;
  return made;
}

function axes(lowest, top, describe, seconds) {
  const made = [];
  for (const share of [0, 0.5, 1]) {
    const y = HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM);
    made.push(svgElement("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y, y2: y }));
    made.push(svgElement("text", { x: LEFT - 6, y: y + 4, "text-anchor": "end" }, describe(lowest + share * (top - lowest))));
  }
  made.push(svgElement("text", { x: LEFT, y: HEIGHT - 4 }, seconds < 120 ? `${seconds} s ago` : `${(seconds / 60).toFixed(0)} min ago`));
  made.push(svgElement("text", { x: WIDTH - RIGHT, y: HEIGHT - 4, "text-anchor": "end" }, "now"));
  return made;
}

// One path for each run of known values; the newest value is at the right edge.
function curves(line, numSlots, lowest, top) {
  const x = (slot) => LEFT + (slot / (numSlots - 1)) * (WIDTH - LEFT - RIGHT);
  const y = (value) => HEIGHT - BOTTOM - ((clamp(value, lowest, top) - lowest) / (top - lowest)) * (HEIGHT - TOP - BOTTOM);
  const made = [];
  let path = "", last = null;
  const first = numSlots - line.values.length;
  line.values.forEach((value, index) => {
    if (value === null) {
      if (path) made.push(svgElement("path", { class: `curve ${line.colour}`, d: path }));
      path = "";
      return;
    }
    last = [x(first + index), y(value)];
    path += `${path ? "L" : "M"}${last[0].toFixed(1)} ${last[1].toFixed(1)}`;
  });
  if (path) made.push(svgElement("path", { class: `curve ${line.colour}`, d: path }));
  if (last) made.push(svgElement("circle", { class: line.colour, cx: last[0], cy: last[1], r: 2.6 }));
  return made;
}

function legendItem(line, describe) {
  const item = element("li");
  item.append(element("span", `swatch ${line.colour}`), `${line.name} `);
  const value = line.values.findLast((one) => one !== null);
  item.append(element("b", "", value === undefined ? "–" : describe(value)));
  return item;
}

function svgElement(name, attributes, text = "") {
  const made = document.createElementNS(NS, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text) made.textContent = text;
  return made;
}

// The next of 1, 2, 4, 6, 10, 20, ... so that the middle line has a round number too.
function roundUp(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 4, 6, 10].find((step) => step * power >= value * 0.999) * power;
}

function clamp(value, lowest, highest) {
  return Math.min(Math.max(value, lowest), highest);
}
