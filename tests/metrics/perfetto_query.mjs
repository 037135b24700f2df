// Loads a trace into Perfetto's own trace processor (WebAssembly) and prints the rows of some queries as JSON.
// Usage: node perfetto_query.mjs FOLDER_WITH_ENGINE TRACE SQL...
// The engine is made for a web worker and speaks length-delimited protobuf; both are stood in for here.
import { readFileSync } from "node:fs";
import { join } from "node:path";
import vm from "node:vm";

const [folder, trace, ...queries] = process.argv.slice(2);

globalThis.self = globalThis;
globalThis.WorkerGlobalScope = class {};
globalThis.location = { href: `file://${folder}/engine_bundle.js`, origin: "file://", pathname: folder };
globalThis.importScripts = () => {};
globalThis.fetch = async (url) => {
  const name = String(url).split("/").pop();
  return new Response(readFileSync(join(folder, name)), { headers: { "Content-Type": "application/wasm" } });
};
globalThis.XMLHttpRequest = class {
  open(_, url) { this.name = String(url).split("/").pop(); }
  send() {
    const data = readFileSync(join(folder, this.name));
    this.response = data.buffer.slice(data.byteOffset, data.byteOffset + data.length);
    this.status = 200;
  }
};
let started;
const engineStarted = new Promise((resolve) => (started = resolve));
for (const name of ["instantiate", "instantiateStreaming"]) {
  const original = WebAssembly[name];
  WebAssembly[name] = async (...args) => {
    const result = await original(...args);
    setTimeout(started, 100); // its own initialisation runs in the promises that follow
    return result;
  };
}

const varint = (value) => {
  const bytes = [];
  for (let rest = BigInt(value); ; rest >>= 7n) {
    if (rest < 128n) return Buffer.from([...bytes, Number(rest)]);
    bytes.push(Number(rest & 127n) | 128);
  }
};
const bytesField = (number, data) => Buffer.concat([varint((number << 3) | 2), varint(data.length), data]);
const intField = (number, value) => Buffer.concat([varint(number << 3), varint(value)]);

function fields(buffer) {
  const found = [];
  let at = 0;
  const readVarint = () => {
    let value = 0n;
    for (let shift = 0n; ; shift += 7n) {
      const byte = buffer[at++];
      value |= BigInt(byte & 127) << shift;
      if (byte < 128) return value;
    }
  };
  while (at < buffer.length) {
    const tag = Number(readVarint());
    if ((tag & 7) === 0) found.push([tag >> 3, readVarint()]);
    else if ((tag & 7) === 1) { found.push([tag >> 3, buffer.subarray(at, at + 8)]); at += 8; }
    else if ((tag & 7) === 2) {
      const length = Number(readVarint());
      found.push([tag >> 3, buffer.subarray(at, at + length)]);
      at += length;
    } else throw new Error(`wire type ${tag & 7}`);
  }
  return found;
}

function packedVarints(buffer) {
  const values = [];
  for (let at = 0; at < buffer.length; ) {
    let value = 0n;
    for (let shift = 0n; ; shift += 7n) {
      const byte = buffer[at++];
      value |= BigInt(byte & 127) << shift;
      if (byte < 128) break;
    }
    values.push(BigInt.asIntN(64, value));
  }
  return values;
}

function rowsOf(results) {
  const names = [];
  const cells = [];
  for (const result of results) {
    for (const [number, data] of fields(result)) {
      if (number === 1) names.push(data.toString());
      if (number === 2 && data.length) throw new Error(data.toString());
      if (number !== 3) continue;
      let kinds = [], ints = [], floats = [], strings = [];
      for (const [part, content] of fields(data)) {
        if (part === 1) kinds = packedVarints(content).map(Number);
        if (part === 2) ints = packedVarints(content);
        if (part === 3) for (let at = 0; at < content.length; at += 8) floats.push(content.readDoubleLE(at));
        if (part === 5) strings = content.toString().split("\0");
      }
      for (const kind of kinds) {
        if (kind === 1) cells.push(null);
        else if (kind === 2) cells.push(Number(ints.shift()));
        else if (kind === 3) cells.push(floats.shift());
        else if (kind === 4) cells.push(strings.shift());
        else throw new Error(`cell type ${kind}`);
      }
    }
  }
  const rows = [];
  for (let at = 0; at < cells.length; at += names.length) {
    rows.push(Object.fromEntries(names.map((name, column) => [name, cells[at + column]])));
  }
  return rows;
}

const { port1, port2 } = new MessageChannel();
let sequence = 0;
const waiting = [];
port1.onmessage = ({ data }) => {
  for (const [, message] of fields(Buffer.from(data))) waiting[0](Buffer.from(message));
};

const APPEND = 1, FINALIZE = 2, QUERY = 3;
function call(method, body, isLast) {
  return new Promise((resolve, reject) => {
    const answers = [];
    waiting.push((message) => {
      for (const [number, data] of fields(message)) {
        if (number === 5) reject(new Error(data.toString()));
        if (number === 203) answers.push(Buffer.from(data));
      }
      if (isLast(message, answers)) { waiting.shift(); resolve(answers); }
    });
    const rpc = Buffer.concat([intField(1, sequence++), intField(2, method), ...body]);
    port1.postMessage(new Uint8Array(bytesField(1, rpc)));
  });
}
const lastBatch = (_, answers) =>
  answers.some((answer) =>
    fields(answer).some(([n, batch]) => n === 3 && fields(batch).some(([m, v]) => m === 6 && v === 1n)) ||
    fields(answer).some(([n, error]) => n === 2 && error.length));

const node = globalThis.process;
new Response(new Uint8Array()); // loads what Node needs for it before the engine is made to believe in a browser
delete globalThis.process;
try {
  vm.runInThisContext(readFileSync(join(folder, "engine_bundle.js"), "utf-8"));
} catch (error) {
  console.error(String(error));
  node.exit(3);
}
globalThis.onmessage({ data: port2 });
await engineStarted;
await call(APPEND, [bytesField(101, readFileSync(trace))], () => true);
await call(FINALIZE, [], () => true);
const answers = [];
for (const sql of queries) answers.push(rowsOf(await call(QUERY, [bytesField(103, bytesField(1, Buffer.from(sql)))], lastBatch)));
console.log(JSON.stringify(answers));
node.exit(0);
