// A flag or a setting is found by all of its words. The search engine would take any of them, and would read a leading
// dash as "without this word".
const post = Worker.prototype.postMessage;
const required = (name) => name.split(/[-_]+/).filter(Boolean).map((word) => `+${word}*`).join(" ");
const query = (text) =>
  text.replace(/(?<!\S)-*\w+(?:[-_]+\w+)*(?!\S)/g, (name) => (/[-_]/.test(name) ? required(name) : name));
Worker.prototype.postMessage = function (message, ...rest) {
  const isQuery = typeof message?.data === "string";
  return post.call(this, isQuery ? { ...message, data: query(message.data) } : message, ...rest);
};
