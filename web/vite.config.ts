import { defineConfig } from "vite";

// One classic script and one stylesheet: the server serves them, a report file holds them.
export default defineConfig({
  esbuild: { jsx: "automatic", jsxImportSource: "preact" },
  build: {
    outDir: "../src/stepscope/view/bundle",
    emptyOutDir: true,
    target: "es2022",
    lib: { entry: "src/main.tsx", formats: ["iife"], name: "stepscope", fileName: () => "page.js", cssFileName: "page" },
  },
  define: { "process.env.NODE_ENV": '"production"' },
});
