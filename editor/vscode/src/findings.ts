/** The findings of the active file's trace as a tree: each with the lines that it names. */

import * as vscode from "vscode";

export interface Place {
  file: string;
  line: number;
  function: string;
  /** The line in the open text; null where it is gone, or in another file. */
  line_now: number | null;
}

export interface Finding {
  rule: string;
  title: string;
  saves: string;
  change: string;
  where: Place[];
}

type Item = { finding: Finding } | { place: Place; uri: vscode.Uri };

export class Findings implements vscode.TreeDataProvider<Item> {
  private readonly changed = new vscode.EventEmitter<void>();
  readonly onDidChangeTreeData = this.changed.event;
  private uri: vscode.Uri | undefined;

  constructor(private readonly ask: (uri: string) => Promise<Finding[] | undefined>) {}

  refresh(): void {
    this.changed.fire();
  }

  async getChildren(item?: Item): Promise<Item[]> {
    if (item !== undefined) {
      const uri = this.uri;
      return "finding" in item && uri ? item.finding.where.map((place) => ({ place, uri })) : [];
    }
    const document = vscode.window.activeTextEditor?.document;
    if (document?.languageId === "python") this.uri = document.uri;
    return this.uri ? ((await this.ask(this.uri.toString())) ?? []).map((finding) => ({ finding })) : [];
  }

  getTreeItem(item: Item): vscode.TreeItem {
    if ("finding" in item) {
      const { rule, title, saves, change, where } = item.finding;
      const state = where.length ? vscode.TreeItemCollapsibleState.Collapsed : vscode.TreeItemCollapsibleState.None;
      return Object.assign(new vscode.TreeItem(title, state), { description: saves, tooltip: `${rule}: ${change}`, contextValue: "finding" });
    }
    const { file, line, line_now, function: name } = item.place;
    const shown = new vscode.TreeItem(`${file.split(/[\\/]/).at(-1)}:${line_now ?? line}`);
    const own = line_now !== null;
    const target = own ? item.uri : vscode.Uri.file(file);
    const at = (own ? line_now : line) - 1;
    const command = { command: "vscode.open", title: "Open", arguments: [target, { selection: new vscode.Range(at, 0, at, 0) }] };
    return Object.assign(shown, { description: name, command });
  }
}
