// Uses the API with an unmodified openai-node; prints its results as one JSON line.
import OpenAI, { toFile } from "openai";

const [baseURL, model, question] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const request = { model, temperature: 0, max_tokens: 12, messages: [{ role: "user", content: question }] };

const whole = await client.chat.completions.create(request);
let streamed = "";
let usage = null;
const stream = await client.chat.completions.create({
  ...request, stream: true, stream_options: { include_usage: true },
});
for await (const chunk of stream) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}
const speech = await client.audio.speech.create({
  model, voice: "alloy", input: question, response_format: "wav",
});
const audio = Buffer.from(await speech.arrayBuffer());
const heard = await client.audio.transcriptions.create({
  model, file: await toFile(audio, "question.wav"),
});
console.log(JSON.stringify({
  whole: whole.choices[0].message.content, streamed, tokens: usage?.completion_tokens,
  riff: audio.subarray(0, 4).toString(), heard: heard.text,
}));
