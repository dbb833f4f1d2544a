/** Starts `stepscope lsp`, shows the findings as a tree, and hands commands on. All answers are the server's. */

import * as vscode from "vscode";
import { LanguageClient } from "vscode-languageclient/node";
import { type Finding, Findings } from "./findings";
import { showPage } from "./page";

let client: LanguageClient | undefined;

export async function activate(context: vscode.ExtensionContext): Promise<void> {
  const [command = "stepscope", ...args] = vscode.workspace.getConfiguration("stepscope").get<string[]>("command") ?? [];
  client = new LanguageClient(
    "stepscope",
    { command, args: args.length ? args : ["lsp"] },
    {
      documentSelector: [{ language: "python", scheme: "file" }],
      middleware: { window: { showDocument: (params, token, next) => showDocument(params, () => next(params, token)) } },
    },
  );
  const findings = new Findings((uri) => ask<Finding[]>("findings", uri));
  const tree = vscode.window.createTreeView("stepscopeFindings", { treeDataProvider: findings });
  const refresh = () => findings.refresh();
  context.subscriptions.push(
    tree,
    vscode.window.onDidChangeActiveTextEditor(refresh),
    vscode.languages.onDidChangeDiagnostics(refresh),
    register("record", async (uri) => {
      const given = await vscode.window.showInputBox({ title: "Record this file", prompt: "Arguments of the program" });
      return given === undefined ? undefined : ask("record", uri, given);
    }),
    register("diagnose", (uri) => ask("diagnose", uri)),
    register("chooseRun", (uri) => ask("chooseRun", uri)),
    register("predict", (uri) => ask("predict", uri)),
    register("whatif", async (uri, item?: { finding?: Finding }) => {
      const rule = item?.finding?.rule ?? (await chosenRule(uri));
      return rule === undefined ? undefined : ask("whatif", uri, rule);
    }),
    register("openPage", (uri) => ask("openPage", uri, (vscode.window.activeTextEditor?.selection.active.line ?? 0) + 1)),
  );
  await client.start();
  await vscode.commands.executeCommand("setContext", "stepscope.isRunning", true);
  refresh();
}

export async function deactivate(): Promise<void> {
  await client?.stop();
}

/** A command about the file in the active editor. */
function register(name: string, run: (uri: string, ...rest: never[]) => unknown): vscode.Disposable {
  return vscode.commands.registerCommand(`stepscope.file.${name}`, (...rest: never[]) => {
    const document = vscode.window.activeTextEditor?.document;
    if (document?.languageId !== "python") return vscode.window.showInformationMessage("stepscope: open a Python file first");
    return run(document.uri.toString(), ...rest);
  });
}

async function ask<T>(name: string, ...args: unknown[]): Promise<T | undefined> {
  if (!client?.isRunning()) return undefined;
  const answer = await client.sendRequest<T | null>("workspace/executeCommand", { command: `stepscope.${name}`, arguments: args });
  return answer ?? undefined;
}

async function chosenRule(uri: string): Promise<string | undefined> {
  const found = (await ask<Finding[]>("findings", uri)) ?? [];
  const items = found.map(({ rule, title, saves }) => ({ label: rule, description: title, detail: saves }));
  return (await vscode.window.showQuickPick(items, { title: "Which finding would be fixed?" }))?.label;
}

/** The page in a tab beside the code; other documents as VS Code shows them. */
async function showDocument<T>(params: { uri: string; external?: boolean }, next: () => T): Promise<Awaited<T> | { success: boolean }> {
  if (!params.external || !/^http:\/\/127\.0\.0\.1:\d+\//.test(params.uri)) return await next();
  await showPage(params.uri);
  return { success: true };
}
