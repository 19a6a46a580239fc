// Opens a page in a headless Chromium and prints JSON: node page_open.js FOLDER_WITH_NODE_MODULES CHROMIUM PAGE
// Every control is used once, on a wide and on a narrow screen, light and dark.
"use strict";
const [folder, chromium, file] = process.argv.slice(2);
const { createRequire } = require("module");
const from = createRequire(`${folder}/`);
const puppeteer = from("puppeteer-core");
const axe = require("fs").readFileSync(from.resolve("axe-core/axe.min.js"), "utf8");

const pause = (ms) => new Promise((done) => setTimeout(done, ms));

(async () => {
  const browser = await puppeteer.launch({ executablePath: chromium, args: ["--no-sandbox", "--disable-gpu"] });
  const found = { open_s: 0, console_errors: [], requests: 0, axe_violations: [], sideways: [], controls: {} };
  const page = await browser.newPage();
  await page.setBypassCSP(true); // for axe alone, which is put into the page
  page.on("console", (message) => { if (["error", "warn"].includes(message.type())) found.console_errors.push(message.text()); });
  page.on("pageerror", (error) => found.console_errors.push(String(error)));
  page.on("request", (one) => { if (!/^(file|data):/.test(one.url())) found.requests += 1; });
  await page.setViewport({ width: 1280, height: 900 });
  const start = performance.now();
  await page.goto(`file://${file}`, { waitUntil: "load" });
  await page.evaluate(() => new Promise((done) => requestAnimationFrame(() => setTimeout(done, 0))));
  found.open_s = Number(((performance.now() - start) / 1000).toFixed(3));
  const spent = await page.metrics(); // seconds of the page's own thread, whatever else the machine does
  for (const name of ["TaskDuration", "ScriptDuration", "LayoutDuration"]) found[name] = Number(spent[name].toFixed(3));

  // the schedule: buttons, keys
  const seen = () => page.$eval("#seen", (one) => one.textContent);
  const whole = await seen();
  for (const name of ["in", "right", "left", "out", "all"]) {
    await page.click(`[data-do=${name}]`);
    found.controls[name] = await seen();
  }
  found.controls.buttons_work = found.controls.in !== whole && found.controls.right !== found.controls.in && found.controls.all === whole;
  await page.focus("#lanes");
  await page.keyboard.press("+");
  const zoomed = await seen();
  await page.keyboard.press("ArrowRight");
  found.controls.keys_work = zoomed !== whole && (await seen()) !== zoomed;
  await page.keyboard.press("Home");
  if (await page.$eval("[data-do=fold]", (one) => !one.hidden)) {
    const height = () => page.$eval("#canvas", (one) => one.offsetHeight);
    const before = await height();
    await page.click("[data-do=fold]");
    found.controls.fold_works = (await height()) >= before;
  }
  if (await page.$eval("[data-do=messages]", (one) => !one.hidden)) {
    const height = () => page.$eval("#canvas", (one) => one.offsetHeight);
    const before = await height();
    await page.focus("#lanes");
    await page.keyboard.press("m");
    const without = await height();
    await page.click("[data-do=messages]");
    found.controls.messages_work = without < before && (await height()) === before;
  }
  // the tree: every block that can be opened is, by keys, and shows its lines
  await page.focus("#tree [tabindex='0']");
  const count = () => page.$$eval("#tree li:not([hidden])", (all) => all.length);
  const blocks = await page.$$eval("#tree li", (all) => all.length);
  let lines = 0;
  for (let n = 0; n < Math.min(blocks, 60); n++) {
    await page.keyboard.press("ArrowRight");
    await page.keyboard.press("Enter");
    lines = Math.max(lines, await page.$$eval("#detail tr", (all) => all.length));
    await page.keyboard.press("ArrowDown");
  }
  found.controls.tree_opens = (await count()) > 0 && (await page.$$eval("#tree [aria-selected=true]", (all) => all.length)) === 1;
  found.controls.detail_lines = lines;
  for (const name of ["in", "right", "left", "out", "all"]) delete found.controls[name];

  for (const width of [1280, 390]) {
    for (const scheme of ["light", "dark"]) {
      await page.setViewport({ width, height: 900 });
      await page.emulateMediaFeatures([{ name: "prefers-color-scheme", value: scheme }]);
      await pause(100);
      if (await page.evaluate(() => document.documentElement.scrollWidth > innerWidth)) found.sideways.push(`${width} ${scheme}`);
      await page.evaluate(axe);
      const result = await page.evaluate(() => axe.run(document, { resultTypes: ["violations"] }));
      for (const one of result.violations) found.axe_violations.push(`${width} ${scheme} ${one.id}: ${one.nodes[0].target}`);
    }
  }
  console.log(JSON.stringify(found));
  await browser.close();
})().catch((error) => { console.error(error); process.exit(1); });
