// The token view: one for each model, from the JSON beside it. No number is worked out here.
"use strict";

const ALL = -1; // of layers, or of heads
const LARGEST = 8; // tokens in the list of the largest
const SHOWN = 0.05; // from this recovery on, a token's number always stands under it
const PART = 10000; // recoveries stand in the JSON as whole numbers of this part
const READABLE = 4.5; // contrast of small text with what is behind it (WCAG AA)

/** An element with attributes and children; text is always text, never markup. */
function make(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children);
  return made;
}

/** A number with two or three decimals and a real minus sign. */
function number(value, digits = 2) {
  const text = value.toFixed(digits);
  return (Number(text) === 0 ? text.replace("-", "") : text).replace("-", "\u2212");
}

/** "0.45 [0.37, 0.55]" from [R, low, high, p]; empty where there is none. */
function interval(cells) {
  if (!cells || cells[0] === null) return "";
  const range = cells[1] === null || cells[2] === null ? "no interval" : `[${number(cells[1])}, ${number(cells[2])}]`;
  const p = cells[3] === null || cells[3] === undefined ? "" : `, p ${cells[3] < 0.001 ? "< 0.001" : `= ${cells[3].toFixed(3)}`}`;
  return `${number(cells[0])} ${range}${p}`;
}

/** The smallest of 1, 2 and 5 times a power of ten that is no less than the value. */
function above(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value * (1 - 1e-9));
}

/** Red, green and blue of a "#rrggbb" from the style sheet, from 0 to 1. */
function rgb(name) {
  const hex = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16) / 255);
}

/** The contrast of two colours, from 1 to 21 (WCAG 2). */
function contrast(one, other) {
  const light = (colour) => {
    const [r, g, b] = colour.map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05;
  };
  const [a, b] = [light(one), light(other)];
  return Math.max(a, b) / Math.min(a, b);
}

/** The first of the page's inks that can be read on a share of a colour; black or white always can. */
function inkOn(share, { mid, full, inks }) {
  const behind = mid.map((part, at) => part + (full[at] - part) * share);
  return inks.find((ink) => contrast(ink.colour, behind) >= READABLE)?.css ?? "";
}

/** A pair as the view asks for it. */
class Pair {
  constructor(record, pair) {
    Object.assign(this, { record, pair });
    this.tables = record.tables[pair.layout];
    this.index = new Map(pair.at.map((position, i) => [position, i]));
    const seen = {};
    this.slots = pair.owner.map((span) => {
      seen[span] = (seen[span] ?? -1) + 1;
      return `${span}[${seen[span]}]`;
    });
    this.bounds = {};
  }

  get isHeads() { return this.record.study === "heads"; }
  get hasLayers() { return this.isHeads || Boolean(this.pair.map); }

  id(arm, position) { return arm === "target" ? (this.pair.target[position] ?? this.pair.base[position]) : this.pair.base[position]; }
  text(id) { return this.record.words[id] ?? `#${id}`; }

  /** The recovery at a position, in parts, with what kind of number it is; undefined where there is none. */
  at(position, { edit, layer, head }) {
    const i = this.index.get(position);
    if (layer === ALL) return i === undefined ? undefined : { value: this.pair[edit][i], kind: "exact" };
    if (!this.isHeads) return i === undefined || !this.pair.map ? undefined : { value: this.pair.map[layer][i], kind: "exact" };
    const first = layer * this.record.heads;
    if (this.pair.query.at(-1) === position && head !== ALL) return { value: this.pair.alone[first + head], kind: "exact" };
    const estimates = this.pair.estimates[position];
    if (!estimates) return undefined;
    if (head !== ALL) return { value: estimates[first + head], kind: "estimate" };
    return { value: this.pair.layers[position][layer], kind: "estimate" };
  }

  /** The scale's end, of everything that the same controls could show: a layer's colours can be compared with another's. */
  bound({ edit, layer, head }) {
    const key = layer === ALL ? edit : head === ALL ? "layers" : "heads";
    this.bounds[key] ??= above(Math.max(PART / 100, ...this.everything(key).map(Math.abs))) / PART;
    return this.bounds[key];
  }

  everything(key) {
    if (key === "single" || key === "lost") return this.pair[key];
    if (!this.isHeads) return (this.pair.map ?? []).flat();
    if (key === "layers") return Object.values(this.pair.layers).flat();
    return [...Object.values(this.pair.estimates).flat(), ...this.pair.alone];
  }
}

/** The view within one element: its controls, what they say, and the two prompts. */
class View {
  constructor(root, records) {
    this.root = root;
    this.pairs = records.flatMap((record) => record.pairs.map((pair) => new Pair(record, pair)));
    this.state = { pair: Math.max(0, this.pairs.findIndex((one) => one.hasLayers)), edit: "single", layer: ALL, head: ALL, numbers: false };
    this.here = null;
    this.build(records);
    this.choosePair();
  }

  get pair() { return this.pairs[this.state.pair]; }

  // --- what stands on the page ---

  build(records) {
    const name = this.root.dataset.view;
    const field = (key, label, control, output) => {
      control.id = `${name}-${key}`;
      const words = make("label", { for: control.id }, label, ...(output ? [" ", output] : []));
      return make("div", key === "pair" ? { class: "wide" } : {}, words, control);
    };
    const groups = records.map((record) => make("optgroup", { label: `${record.name}: ${record.pairs.length} of ${Object.values(record.included).reduce((a, b) => a + b, 0)} included pairs` }));
    this.pairs.forEach((one, at) => {
      const said = one.isHeads || one.hasLayers ? ` \u2014 ${one.isHeads ? "by layer and head" : "by layer"}` : "";
      groups[records.indexOf(one.record)].append(make("option", { value: at }, `${one.pair.id}${said}`));
    });
    this.controls = {
      pair: make("select", {}, ...groups),
      edit: make("select", {}),
      layer: make("input", { type: "range", min: ALL, step: 1 }),
      head: make("input", { type: "range", min: ALL, step: 1 }),
      numbers: make("input", { type: "checkbox", id: `${name}-numbers` }),
    };
    this.outputs = { layer: make("output", {}), head: make("output", {}) };
    const check = make("label", { class: "check", for: `${name}-numbers` }, this.controls.numbers, "a number under every token");
    this.legend = make("div", { class: "legend" });
    this.told = make("p", { class: "told" });
    this.readout = make("p", { class: "readout", "aria-live": "polite" });
    this.arms = { base: make("div", { class: "arm" }), target: make("div", { class: "arm" }) };
    this.below = make("div", { class: "below" });
    this.root.append(
      make("div", { class: "controls" },
        field("pair", "Pair", this.controls.pair),
        field("edit", "Edit: the target's cells of a token", this.controls.edit),
        field("layer", "Layer:", this.controls.layer, this.outputs.layer),
        field("head", "Head:", this.controls.head, this.outputs.head),
        check),
      this.legend, this.readout,
      make("div", {}, this.told, make("div", { class: "arms" }, this.arms.base, this.arms.target)),
      this.below);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.shade());
    this.listen();
  }

  listen() {
    const { pair, edit, layer, head, numbers } = this.controls;
    pair.addEventListener("change", () => { this.state.pair = Number(pair.value); this.choosePair(); });
    edit.addEventListener("change", () => { this.state.edit = edit.value; this.shade(); });
    layer.addEventListener("input", () => { this.state.layer = Number(layer.value); this.shade(); });
    head.addEventListener("input", () => { this.state.head = Number(head.value); this.shade(); });
    numbers.addEventListener("change", () => { this.state.numbers = numbers.checked; this.shade(); });
  }

  // --- a pair ---

  choosePair() {
    const { pair, state, controls } = this;
    controls.pair.value = state.pair;
    const edits = { single: "alone, all else base's", ...(pair.pair.lost ? { lost: "missing, all other notes the target's: what is lost" } : {}) };
    if (!edits[state.edit]) state.edit = "single";
    controls.edit.replaceChildren(...Object.entries(edits).map(([value, words]) => make("option", { value }, words)));
    controls.edit.value = state.edit;
    controls.layer.max = pair.record.layers - 1;
    controls.head.max = pair.record.heads - 1;
    state.layer = pair.hasLayers ? Math.min(state.layer, pair.record.layers - 1) : ALL;
    state.head = Math.min(state.head, pair.record.heads - 1);
    // the paper's names, stale and oracle, are of field pairs
    const names = pair.pair.kind === "field" ? ["Stale prompt (base)", "Oracle prompt (target)"] : ["Base prompt", "Target prompt"];
    this.drawArm("base", names[0], 0);
    this.drawArm("target", names[1], 1);
    this.shade();
    this.tell(null);
  }

  drawArm(arm, title, at) {
    const { pair } = this;
    const action = pair.text(pair.pair.actions[at]).trim();
    const margin = number(pair.pair.margins[at]);
    const box = make("div", { class: "prompt", role: "listbox", "aria-label": `${title}: tokens`, "aria-orientation": "horizontal" });
    const changed = new Set(pair.pair.changed);
    const query = new Set(pair.pair.query);
    pair.pair.base.forEach((_, position) => {
      const text = pair.text(pair.id(arm, position));
      const kinds = ["token", ...(changed.has(position) ? ["changed"] : []), ...(query.has(position) ? ["query"] : [])];
      const token = make("span", { class: kinds.join(" "), role: "option", "aria-selected": "false", tabindex: position ? -1 : 0, "data-p": position });
      const lines = text.split("\n").length - 1;
      if (lines) token.classList.add("end");
      token.append(make("span", {}, lines ? text.replaceAll("\n", "\u21b5") : text), make("small", {}));
      box.append(token, ...Array.from({ length: Math.min(lines, 2) }, () => make("br", { role: "presentation" })));
    });
    box.addEventListener("pointerover", (event) => this.tell(this.position(event.target)));
    box.addEventListener("pointerleave", () => this.tell(this.position(document.activeElement)));
    box.addEventListener("focusin", (event) => this.focus(event.target));
    box.addEventListener("keydown", (event) => this.key(event));
    this.arms[arm].replaceChildren(make("h4", {}, `${title} `, make("span", {}, `answers \u201c${action}\u201d, margin ${margin} logits`)), box);
  }

  position(element) {
    const token = element && this.root.contains(element) ? element.closest(".token") : null;
    return token ? Number(token.dataset.p) : null;
  }

  tokens(position) { return this.root.querySelectorAll(`.token[data-p="${position}"]`); }

  // --- shading ---

  shade() {
    const { pair, state, controls, outputs } = this;
    const hasHeads = pair.isHeads && state.layer !== ALL;
    controls.layer.disabled = !pair.hasLayers;
    controls.head.disabled = !hasHeads;
    controls.edit.disabled = state.layer !== ALL;
    controls.layer.value = state.layer;
    controls.head.value = hasHeads ? state.head : ALL;
    outputs.layer.textContent = state.layer === ALL ? `all ${pair.record.layers}` : `${state.layer} of 0\u2013${pair.record.layers - 1}`;
    outputs.head.textContent = !hasHeads || state.head === ALL ? "all" : `${state.head} of 0\u2013${pair.record.heads - 1}`;
    if (!pair.hasLayers) outputs.layer.textContent += " (no map of this pair)";
    if (!pair.isHeads) outputs.head.textContent += " (none in this study)";
    else if (!hasHeads) outputs.head.textContent += " (choose a layer first)";
    for (const key of ["layer", "head"]) controls[key].setAttribute("aria-valuetext", outputs[key].textContent);
    const bound = pair.bound(this.asked);
    const colours = this.colours();
    for (const token of this.root.querySelectorAll(".token")) this.shadeToken(token, bound, colours);
    this.drawLegend(bound);
    this.read();
    this.list();
    this.tell(this.here);
  }

  /** What the controls ask for. */
  get asked() { return { ...this.state, head: this.pair.isHeads ? this.state.head : ALL }; }

  /** The colours of the page as it is now, light or dark. */
  colours() {
    const ink = (colour, css) => ({ colour, css });
    const last = [ink([0, 0, 0], "#000000"), ink([1, 1, 1], "#ffffff")];
    const inks = [ink(rgb("--ink"), "var(--ink)"), ...last];
    return { mid: rgb("--mid"), towards: rgb("--towards"), away: rgb("--away"), inks, quiet: [ink(rgb("--quiet"), "var(--quiet)"), ...inks] };
  }

  shadeToken(token, bound, colours) {
    const found = this.pair.at(Number(token.dataset.p), this.asked);
    const value = found ? found.value / PART : 0;
    const share = Math.min(1, Math.abs(value) / bound);
    token.style.setProperty("--s", share.toFixed(3));
    token.classList.toggle("away", value < 0);
    token.classList.toggle("unknown", !found);
    const inks = !found || token.classList.contains("end") ? colours.quiet : colours.inks;
    token.style.color = inkOn(share, { mid: colours.mid, full: value < 0 ? colours.away : colours.towards, inks });
    token.classList.toggle("estimated", found?.kind === "estimate");
    const least = Math.min(SHOWN, bound / 4);
    const shown = found && (this.state.numbers || Math.abs(value) >= least);
    token.lastChild.textContent = shown ? number(value, bound < 0.2 ? 3 : 2) : "";
    const kinds = token.classList.contains("changed") ? ", changed" : token.classList.contains("query") ? ", query block" : "";
    const position = Number(token.dataset.p);
    token.setAttribute("aria-label", `${token.firstChild.textContent.trim() || "space"}, position ${position}, ${this.pair.pair.owner[position]}${kinds}, ${found ? `R ${number(value, 3)}` : "no number"}`);
  }

  drawLegend(bound) {
    const ticks = [-bound, -bound / 2, 0, bound / 2, bound].map((value) => make("span", {}, number(value, bound < 0.2 ? 3 : 2)));
    this.legend.replaceChildren(
      make("div", { class: "scale", role: "img", "aria-label": `Colours: recovery from ${number(-bound)} (orange, away from the target's action) over 0 to ${number(bound)} (blue, towards it)` },
        make("span", {}, "away"), make("span", { class: "bar" }), make("span", {}, "towards the target's action"), make("span", { class: "ticks" }, ...ticks)),
      make("span", {}, make("span", { class: "key changed" }, "a"), " changed span"),
      make("span", {}, make("span", { class: "key query" }, "a"), " query block, where the decision is read"),
      make("span", {}, "Arrow keys move through a prompt; [ and ], or Shift with \u2190 and \u2192, change the layer."));
  }

  // --- words ---

  /** What is known of the chosen layer or head as a whole. */
  read() {
    const { pair } = this;
    const { layer, head, edit } = this.asked;
    const said = [];
    if (layer === ALL) said.push(edit === "lost" ? "Each token: what all notes lose without its cells, at all layers." : "Each token: its cells alone, at all layers.");
    else if (!pair.isHeads) {
      said.push(`Each token: its cells alone, at layer ${layer} alone.`);
      const all = interval(pair.tables.layers?.[layer]);
      if (all) said.push(`All notes at layer ${layer}, over ${pair.record.included[pair.pair.layout]} pairs: R ${all}.`);
    } else if (head === ALL) said.push(`Layer ${layer}: the first-order effects of its ${pair.record.heads} heads' z at a token, added up. Underlined tokens have an estimate.`);
    else said.push(...this.readHead(`${layer}.${head}`, layer, head));
    this.readout.textContent = said.join(" ");
  }

  readHead(name, layer, head) {
    const { record, pair, tables } = this.pair;
    const at = layer * record.heads + head;
    const group = Math.floor(head / (record.heads / record.kvHeads));
    const kv = `${layer}.${group}`;
    const over = (cells) => (interval(cells) ? ` (over pairs ${interval(cells)})` : "");
    const shares = Object.entries(pair.attends).map(([kind, values]) => `${kind.replaceAll("_", " ")} ${number(values[at] / PART)}`);
    return [
      `Head ${name}: its z alone at the decision, R ${number(pair.alone[at] / PART, 3)}${over(tables.heads?.[name])};`,
      `added to the margin directly, ${number(pair.direct[at] / PART, 3)}${over(tables.direct?.[name])};`,
      `attention from the decision: ${shares.join(", ")}.`,
      `KV head ${kv}, its cells downstream: R ${number(pair.kv[layer * record.kvHeads + group] / PART, 3)}${over(tables.kv?.[kv])}.`,
      "Underlined tokens: first-order effect of its z there.",
    ];
  }

  /** The interval of a token's slot, where the record has one for what is shown. */
  slotCells(position) {
    const { layer, edit } = this.asked;
    if (layer !== ALL || this.pair.isHeads) return null;
    return this.pair.tables[edit === "lost" ? "lost" : "alone"]?.[this.pair.slots[position]] ?? null;
  }

  tell(position) {
    if (this.here !== position && this.here !== null) this.tokens(this.here).forEach((one) => one.classList.remove("here"));
    this.here = position;
    if (position === null) {
      this.told.textContent = "Point at a token, or move to one with the keyboard, for its number, class and interval.";
      return;
    }
    this.tokens(position).forEach((one) => one.classList.add("here"));
    const { pair } = this;
    const found = pair.at(position, this.asked);
    const texts = ["base", "target"].map((arm) => pair.text(pair.id(arm, position)));
    const shown = texts.map((text) => make("span", { class: "piece" }, `\u201c${text.replaceAll("\n", "\u21b5")}\u201d`));
    const changed = pair.pair.changed.includes(position);
    const cells = this.slotCells(position);
    const kind = found?.kind === "estimate" ? " (first order)" : "";
    this.told.replaceChildren(
      shown[0], ...(changed ? [" \u2192 ", shown[1], " (changed)"] : []),
      `, position ${position}, class ${pair.pair.owner[position]}, slot ${pair.slots[position]}. `,
      ...(found ? ["This pair: ", make("b", {}, `R ${number(found.value / PART, 3)}`), `${kind}. `] : [this.why(position)]),
      cells ? `This slot over pairs: ${interval(cells)}.` : found ? "No interval: one pair's number." : "");
  }

  why(position) {
    const { pair } = this;
    if (pair.pair.changed.includes(position)) return "The changed span: only notes are edited here. ";
    if (!pair.index.has(position) && !pair.pair.query.includes(position)) return "Before the change: the same in both arms. ";
    if (pair.pair.query.includes(position)) return "Query block: recomputed, never edited. ";
    return "No estimate was kept at this token. ";
  }

  // --- lists ---

  list() {
    const { pair } = this;
    const ranked = pair.pair.base.map((_, position) => ({ position, found: pair.at(position, this.asked) }))
      .filter((one) => one.found && one.found.value !== 0)
      .sort((a, b) => Math.abs(b.found.value) - Math.abs(a.found.value) || a.position - b.position)
      .slice(0, LARGEST);
    const rows = ranked.map(({ position, found }) => make("tr", {},
      make("td", { class: "number" }, String(position)),
      make("td", { class: "piece" }, pair.text(pair.id("base", position)).replaceAll("\n", "\u21b5")),
      make("td", {}, pair.pair.owner[position]),
      make("td", { class: "number" }, number(found.value / PART, 3)),
      make("td", { class: "number" }, interval(this.slotCells(position)) || "\u2014")));
    const head = ["position", "token", "class", "R, this pair", "slot over pairs"].map((name, at) => make("th", { scope: "col", class: at === 1 || at === 2 ? null : "number" }, name));
    const largest = make("div", {}, make("h4", {}, "Largest here"), rows.length
      ? make("div", { class: "scroll" }, make("table", {}, make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...rows)))
      : make("p", { class: "said" }, "Nothing is moved here."));
    this.below.replaceChildren(largest, ...(pair.isHeads ? [this.attention()] : []));
  }

  /** The named read heads of the pair: what each attends to; its name chooses it. */
  attention() {
    const { named, random } = this.pair.pair;
    const all = { ...named, ...(Object.keys(random).length ? { "at random": random } : {}) };
    const total = {};
    for (const shares of Object.values(named)) for (const [kind, share] of Object.entries(shares)) total[kind] = (total[kind] ?? 0) + share;
    const kinds = Object.keys(total).sort((a, b) => total[b] - total[a]).slice(0, 6);
    const rows = Object.entries(all).map(([name, shares]) => make("tr", {},
      make("th", { scope: "row" }, name in named ? this.headButton(name) : name),
      ...kinds.map((kind) => {
        const cell = make("td", { class: "number share" }, number(shares[kind] ?? 0));
        cell.style.setProperty("--s", shares[kind] ?? 0);
        return cell;
      })));
    const head = ["read head", ...kinds.map((kind) => kind.replaceAll("_", " "))].map((name, at) => make("th", { scope: "col", class: at ? "number" : null }, name));
    return make("div", {}, make("h4", {}, "Attention from the decision, this pair"),
      make("div", { class: "scroll" }, make("table", { class: "attention" }, make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...rows))));
  }

  headButton(name) {
    const button = make("button", { type: "button", class: "head", "aria-label": `show head ${name}` }, name);
    button.addEventListener("click", () => {
      [this.state.layer, this.state.head] = name.split(".").map(Number);
      this.shade();
      this.below.querySelector(`[aria-label="show head ${name}"]`)?.focus();
    });
    return button;
  }

  // --- keyboard ---

  focus(token) {
    const own = token.closest(".token");
    if (!own) return;
    const box = own.parentElement;
    for (const one of box.querySelectorAll('.token[tabindex="0"]')) {
      one.tabIndex = -1;
      one.setAttribute("aria-selected", "false");
    }
    own.tabIndex = 0;
    own.setAttribute("aria-selected", "true");
    this.tell(Number(own.dataset.p));
  }

  key(event) {
    const step = View.step(event);
    if (!step && (event.ctrlKey || event.metaKey || event.altKey)) return;
    const token = event.target.closest(".token");
    const all = [...token.parentElement.querySelectorAll(".token")];
    const at = all.indexOf(token);
    const moves = {
      ArrowRight: () => all[at + 1], ArrowLeft: () => all[at - 1], Home: () => all[0], End: () => all.at(-1),
      ArrowDown: () => View.nearest(token, all.slice(at + 1), 1), ArrowUp: () => View.nearest(token, all.slice(0, at).reverse(), -1),
    };
    if (step && this.pair.hasLayers) {
      this.state.layer = Math.max(ALL, Math.min(this.pair.record.layers - 1, this.state.layer + step));
      this.shade();
    } else if (moves[event.key]) moves[event.key]()?.focus();
    else if (!step) return;
    event.preventDefault();
  }

  /** How many layers a key goes up. Brackets need Alt on some keyboards, or AltGr, which says Ctrl and Alt. */
  static step({ key, shiftKey, ctrlKey, altKey, metaKey }) {
    if (metaKey || (ctrlKey && !altKey)) return 0;
    if (key === "[" || key === "]") return key === "]" ? 1 : -1;
    if (!shiftKey || altKey) return 0;
    return { ArrowLeft: -1, ArrowRight: 1 }[key] ?? 0;
  }

  /** Of some tokens, in order, the one on the next line that lies nearest to the token's middle. */
  static nearest(token, others, direction) {
    const middle = (one) => { const box = one.getBoundingClientRect(); return { x: box.left + box.width / 2, y: box.top }; };
    const from = middle(token);
    const beyond = others.map((one) => ({ one, ...middle(one) })).filter(({ y }) => direction * (y - from.y) > 4);
    if (!beyond.length) return undefined;
    const line = beyond.filter(({ y }) => Math.abs(y - beyond[0].y) <= 4);
    return line.reduce((a, b) => (Math.abs(b.x - from.x) < Math.abs(a.x - from.x) ? b : a)).one;
  }
}

for (const root of document.querySelectorAll(".view")) {
  new View(root, JSON.parse(document.getElementById(root.dataset.view).textContent));
}
