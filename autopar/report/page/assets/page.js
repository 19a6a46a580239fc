"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const make = (tag, text, attributes = {}) => {
    const element = document.createElement(tag);
    if (text !== undefined) element.textContent = text;
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    return element;
  };

  // ---- the model: a tree with one stop of the Tab key
  const tree = document.getElementById("tree"), detail = document.getElementById("detail");
  const all = [...tree.querySelectorAll("[role=treeitem]")], level = (item) => Number(item.getAttribute("aria-level"));
  const hide = () => {
    let closed = Infinity;  // the level of a closed block that what follows is inside of
    for (const item of all) {
      if (level(item) <= closed) closed = Infinity;
      item.hidden = closed !== Infinity;
      if (closed === Infinity && item.getAttribute("aria-expanded") === "false") closed = level(item);
    }
  };
  const items = () => all.filter((one) => !one.hidden);
  const open = (item, value) => {
    if (item.hasAttribute("aria-expanded")) item.setAttribute("aria-expanded", value);
    hide();
  };
  const focus = (item) => {
    if (!item) return;
    for (const one of tree.querySelectorAll("[tabindex='0']")) one.tabIndex = -1;
    item.tabIndex = 0;
    item.focus();
  };
  const above = (item) => all.slice(0, all.indexOf(item)).reverse().find((one) => level(one) < level(item));
  const path = (item) => {
    const names = [];
    for (let one = item; one; one = above(one)) names.unshift(one.querySelector("code").textContent);
    return names.join(".");
  };
  const table = (caption, head, rows) => {
    const scroll = make("div", undefined, { class: "scroll", role: "region", tabindex: "0", "aria-label": caption });
    const one = make("table"), top = make("thead"), row = make("tr"), body = make("tbody");
    one.append(make("caption", caption));
    for (const cell of head) row.append(make("th", cell, { scope: "col" }));
    top.append(row);
    for (const cells of rows) body.append(cells);
    one.append(top, body);
    scroll.append(one);
    return scroll;
  };
  const line = (cells, heading) => {
    const row = make("tr");
    cells.forEach((cell, i) => {
      const element = make(i === 0 && heading ? "th" : "td");
      if (i === 0 && heading) element.scope = "row";
      element.append(make("code", cell));
      if (i === cells.length - 1 && cell) element.className = "msg";
      row.append(element);
    });
    return row;
  };
  const show = (item) => {
    for (const one of tree.querySelectorAll("[aria-selected=true]")) one.setAttribute("aria-selected", "false");
    item.setAttribute("aria-selected", "true");
    let owner = item;
    while (owner && !("code" in owner.dataset)) owner = above(owner);
    detail.replaceChildren(make("h3", path(item)));
    const about = JSON.parse(item.dataset.about);
    if (about.length) {
      detail.append(table("On the rank that holds most of it", ["What", "Answer"], about.map(([what, text]) => {
        const row = make("tr");
        row.append(make("th", what, { scope: "row" }), make("td", text));
        return row;
      })));
    }
    if (!owner) return;
    const code = data.codes[owner.dataset.code];
    if (owner !== item) detail.append(make("p", `Part of ${path(owner)}, which does:`, { class: "dim" }));
    for (const one of code.functions) {
      const rows = one.arguments.map(([name, spec]) => line([name, "given", spec, ""], true));
      for (const [source, outs, call, specs, messages] of one.lines) {
        if (source) {
          const row = make("tr", undefined, { class: "src" });
          row.append(make("th", source, { scope: "rowgroup", colspan: "4" }));
          rows.push(row);
        }
        rows.push(line([outs || "–", call, specs, messages], true));
      }
      detail.append(table(`${code.name}, ${one.name}`, ["Value", "Made by", "Spec", "Messages"], rows));
    }
  };
  tree.addEventListener("click", (event) => {
    const item = event.target.closest("[role=treeitem]");
    if (!item) return;
    focus(item);
    if (event.target.closest(".twist") || item.getAttribute("aria-selected") === "true" || item.getAttribute("aria-expanded") === "false") {
      open(item, item.getAttribute("aria-expanded") !== "true");
    }
    show(item);
  });
  tree.addEventListener("keydown", (event) => {
    const item = event.target.closest("[role=treeitem]"), shown = items(), at = shown.indexOf(item);
    const state = item.getAttribute("aria-expanded");
    const acts = {
      ArrowDown: () => focus(shown[at + 1]),
      ArrowUp: () => focus(shown[at - 1]),
      Home: () => focus(shown[0]),
      End: () => focus(shown[shown.length - 1]),
      ArrowRight: () => (state === "false" ? open(item, true) : state === "true" ? focus(shown[at + 1]) : 0),
      ArrowLeft: () => (state === "true" ? open(item, false) : focus(above(item))),
      Enter: () => show(item),
      " ": () => show(item),
    };
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    if (acts[event.key]) {
      acts[event.key]();
      event.preventDefault();
    } else if (event.key.length === 1) {
      const starts = (one) => one.querySelector("code").textContent.toLowerCase().startsWith(event.key.toLowerCase());
      focus([...shown.slice(at + 1), ...shown.slice(0, at)].find(starts));
    }
  });

  hide();

  // ---- the schedule: lanes on a canvas, of which only what is seen is drawn
  const TICKS = 1e6, LEFT = 86, ROW = 24, AXIS = 26, KINDS = "FBW", WORDS = ["forward", "backward", "weight gradients"];
  const lanes = data.lanes, holder = document.getElementById("lanes"), canvas = document.getElementById("canvas");
  const seen = document.getElementById("seen"), fold = document.querySelector("[data-do=fold]");
  const alike = lanes.rows.some((row) => row.like !== null);
  let begin = 0, end = 1, folded = alike, rows = [], printing = false;
  fold.hidden = !alike;
  const seconds = (s) => {
    for (const [unit, scale] of [["s", 1], ["ms", 1e-3], ["µs", 1e-6], ["ns", 1e-9]]) {
      if (Math.abs(s) >= scale) return `${Number((s / scale).toPrecision(3))} ${unit}`;
    }
    return "0 s";
  };
  const layout = () => {
    rows = [];
    let skipped = 0;
    lanes.rows.forEach((row, i) => {
      const next = lanes.rows[i + 1], last = !next || next.like !== row.like;
      if (!folded || row.like === null || last) {
        if (skipped) rows.push({ gap: skipped });
        skipped = 0;
        rows.push(row);
      } else skipped += 1;
    });
    fold.setAttribute("aria-pressed", String(!folded));
    fold.textContent = folded ? "Show lanes that are alike" : "Fold lanes that are alike";
  };
  const colours = () => {
    const dark = !printing && matchMedia("(prefers-color-scheme: dark)").matches;
    return dark ? { fg: "#e8eaed", dim: "#a8b0b9", line: "#343a41", bg: "#14171a" } : { fg: "#1b1f24", dim: "#57606a", line: "#d5dae0", bg: "#ffffff" };
  };
  const FILL = ["#1f5fbf", "#23703a", "#a04a00"], LIGHTER = ["#3a72c4", "#2f8050", "#b05a14"];
  const firstAfter = (bars, tick) => {
    let low = 0, high = bars.length / 5;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (bars[5 * middle + 3] + bars[5 * middle + 4] < tick) low = middle + 1;
      else high = middle;
    }
    return low;
  };
  const draw = () => {
    const width = holder.clientWidth, height = rows.length * ROW + AXIS + 6, ratio = window.devicePixelRatio || 1;
    canvas.width = width * ratio;
    canvas.height = height * ratio;
    canvas.style.height = `${height}px`;
    const pen = canvas.getContext("2d"), colour = colours(), wide = width - LEFT - 10;
    const x = (tick) => LEFT + ((tick / TICKS - begin) / (end - begin)) * wide;
    pen.scale(ratio, ratio);
    pen.fillStyle = colour.bg;
    pen.fillRect(0, 0, width, height);
    pen.font = "12px system-ui, sans-serif";
    pen.textBaseline = "middle";
    rows.forEach((row, i) => {
      const top = i * ROW + 4, tall = ROW - 5;
      pen.textAlign = "left";
      pen.fillStyle = row.gap ? colour.dim : colour.fg;
      pen.fillText(row.gap ? `⋮ ${row.gap} alike` : row.name, 8, top + tall / 2, LEFT - 14);
      if (row.gap) return;
      const bars = row.bars;
      pen.save();
      pen.beginPath();
      pen.rect(LEFT, top, wide, tall);
      pen.clip();
      pen.textAlign = "center";
      for (let n = firstAfter(bars, begin * TICKS); n < bars.length / 5; n++) {
        const kind = bars[5 * n], mb = bars[5 * n + 2], start = bars[5 * n + 3], long = bars[5 * n + 4];
        if (start / TICKS > end) break;
        const from = x(start), to = x(start + long), size = Math.max(to - from, 0.6);
        pen.fillStyle = (mb % 2 ? LIGHTER : FILL)[kind];
        pen.fillRect(from, top, size > 3 ? size - 0.8 : size, tall);
        if (kind > 0 && size > 1.5) {
          pen.fillStyle = "rgba(255,255,255,0.85)";
          pen.fillRect(from, kind === 1 ? top : top + tall - 2, size > 3 ? size - 0.8 : size, 2);
        }
        const text = KINDS[kind] + mb;
        const label = size > 8 * text.length + 4 ? text : size > 8 * String(mb).length + 2 ? String(mb) : "";
        if (label) {
          pen.fillStyle = "#ffffff";
          pen.fillText(label, from + size / 2, top + tall / 2 + 0.5);
        }
      }
      pen.restore();
    });
    const bottom = rows.length * ROW + 6;
    pen.strokeStyle = colour.dim;
    pen.beginPath();
    pen.moveTo(LEFT, bottom);
    pen.lineTo(LEFT + wide, bottom);
    pen.stroke();
    const marks = Math.max(2, Math.min(8, Math.floor(wide / 90)));
    for (let k = 0; k <= marks; k++) {
      const at = begin + ((end - begin) * k) / marks;
      pen.textAlign = k === 0 ? "left" : k === marks ? "right" : "center";
      pen.fillStyle = colour.dim;
      pen.fillText(seconds(at * lanes.span_s), LEFT + (wide * k) / marks, bottom + 13);
    }
  };
  const tell = () => {
    seen.textContent = `Shown: ${seconds(begin * lanes.span_s)} to ${seconds(end * lanes.span_s)} of ${seconds(lanes.span_s)}.`;
  };
  const move = (by) => {
    const step = Math.max(-begin, Math.min(1 - end, by * (end - begin)));
    begin += step;
    end += step;
  };
  const zoom = (factor, at = (begin + end) / 2) => {
    const length = Math.min(1, Math.max(1e-4, (end - begin) * factor)), part = (at - begin) / (end - begin);
    begin = Math.max(0, Math.min(1 - length, at - part * length));
    end = begin + length;
  };
  const acts = {
    in: () => zoom(0.5),
    out: () => zoom(2),
    left: () => move(-0.25),
    right: () => move(0.25),
    all: () => { begin = 0; end = 1; },
    fold: () => { folded = !folded; layout(); },
  };
  const act = (name) => { acts[name](); draw(); tell(); };
  document.querySelector(".controls").addEventListener("click", (event) => {
    const name = event.target.closest("button")?.dataset.do;
    if (name) act(name);
  });
  const keys = { "+": "in", "=": "in", "-": "out", _: "out", ArrowLeft: "left", ArrowRight: "right", Home: "all", 0: "all" };
  holder.addEventListener("keydown", (event) => {
    if (keys[event.key] && !event.ctrlKey && !event.metaKey && !event.altKey) {
      act(keys[event.key]);
      event.preventDefault();
    }
  });
  const place = (event) => {
    const box = canvas.getBoundingClientRect();
    return [begin + ((event.clientX - box.left - LEFT) / (box.width - LEFT - 10)) * (end - begin), Math.floor((event.clientY - box.top - 2) / ROW)];
  };
  canvas.addEventListener("pointermove", (event) => {
    const [at, i] = place(event), row = rows[i];
    if (event.buttons === 1 && event.pointerType !== "touch") {
      move(-event.movementX / (canvas.clientWidth - LEFT - 10));
      draw();
    }
    if (!row || row.gap) return;
    const n = firstAfter(row.bars, at * TICKS), [kind, stage, mb, start, long] = row.bars.slice(5 * n, 5 * n + 5);
    if (kind !== undefined && start <= at * TICKS) {
      seen.textContent = `${row.name}: ${WORDS[kind]} of microbatch ${mb}, stage ${stage}, ${seconds((start / TICKS) * lanes.span_s)} to ${seconds(((start + long) / TICKS) * lanes.span_s)}.`;
    } else seen.textContent = `${row.name}: idle at ${seconds(at * lanes.span_s)}.`;
  });
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return;
    zoom(event.deltaY > 0 ? 1.25 : 0.8, place(event)[0]);
    draw();
    tell();
    event.preventDefault();
  }, { passive: false });
  layout();
  draw();
  tell();
  new ResizeObserver(draw).observe(holder);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  matchMedia("print").addEventListener("change", (event) => { printing = event.matches; draw(); });
})();
