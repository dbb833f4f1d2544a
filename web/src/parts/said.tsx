/** What a command prints as prose, and the line to type for it. */

import type { Said } from "../documents";
import { Code } from "./controls";

/** Without those that explain a table of the terminal's, which the page has in a form of its own. */
export function Sentences({ said }: { said: readonly Said[] }) {
  const shown = said.filter(({ texts, about_table }) => texts.length && !about_table);
  return (
    <>
      {shown.map(({ title, texts }) => (
        <section class="said-section">
          {title && <h3>{title}</h3>}
          {texts.map((text) => (
            <p>{text}</p>
          ))}
        </section>
      ))}
    </>
  );
}

export const CommandLine = ({ words }: { words: readonly string[] }) => (
  <section class="said-section">
    <h3>The same in a terminal</h3>
    <Code text={["stepscope", ...words].map(shellWord).join(" ")} />
  </section>
);

/** A word as a POSIX shell reads it. */
export const shellWord = (word: string) => (/^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", `'"'"'`)}'`);

/** Options of the address as words of the command line; several values of one stand on lines of their own. */
export function optionWords(options: Readonly<Record<string, string>>, flags: readonly string[] = []): string[] {
  return Object.entries(options).flatMap(([name, value]) =>
    value.split("\n").filter(Boolean).flatMap((each) => (flags.includes(name) ? [`--${name}`] : [`--${name}`, each])),
  );
}
