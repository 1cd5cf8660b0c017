//! All commands in one file, for archives: it is the command by whose name it is called
//! (`gemma4-run`, by a link), or the one that its first argument names (`gemma4 run`). The modules
//! are the commands' own sources.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::{self, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, ExitCode};

use anyhow::Context;
use clap::CommandFactory;
use clap_complete::Shell;
use gemma4_runtime::cli;

#[path = "../../../runtime/src/bin/gemma4-bench.rs"]
mod bench;
#[path = "../../../runtime/src/bin/gemma4-eval.rs"]
mod eval;
#[path = "gemma4-export.rs"]
mod export;
#[path = "../../../runtime/src/bin/gemma4-inspect.rs"]
mod inspect;
#[path = "gemma4-quantize.rs"]
mod quantize;
#[path = "../../../runtime/src/bin/gemma4-run.rs"]
mod run;
#[path = "gemma4-validate.rs"]
mod validate;

/// One of the commands.
struct Applet {
    /// What follows `gemma4-` in its name.
    name: &'static str,
    main: fn() -> ExitCode,
    command: fn() -> clap::Command,
}

const APPLETS: [Applet; 7] = [
    Applet { name: "export", main: export::main, command: export::Arguments::command },
    Applet { name: "quantize", main: quantize::main, command: quantize::Arguments::command },
    Applet { name: "validate", main: validate::main, command: validate::Arguments::command },
    Applet { name: "run", main: run::main, command: cli::answering::Arguments::command },
    Applet { name: "inspect", main: inspect::main, command: inspect::Arguments::command },
    Applet { name: "eval", main: eval::main, command: cli::evaluation::Arguments::command },
    Applet { name: "bench", main: bench::main, command: bench::Arguments::command },
];

/// Writes completions and manual pages; for whoever makes an archive, so `--help` is silent of it.
const WRITE_DOCUMENTS: &str = "write-documents";

fn main() -> ExitCode {
    let mut arguments = std::env::args_os();
    let own = arguments.next().unwrap_or_default();
    if let Some(applet) = applet(Path::new(&own).file_name().unwrap_or(&own)) {
        return (applet.main)();
    }
    cli::run(|| dispatch(arguments))
}

/// The command of that name, with or without `gemma4-`.
fn applet(name: &OsStr) -> Option<&'static Applet> {
    let name = name.to_str()?;
    APPLETS.iter().find(|applet| applet.name == name.strip_prefix("gemma4-").unwrap_or(name))
}

fn dispatch(mut arguments: impl Iterator<Item = OsString>) -> anyhow::Result<ExitCode> {
    let first = arguments.next();
    match first.as_ref().and_then(|first| first.to_str()) {
        Some("--version" | "-V") => {
            writeln!(io::stdout(), "gemma4 {}", env!("CARGO_PKG_VERSION"))?;
            Ok(ExitCode::SUCCESS)
        }
        Some("--help" | "-h" | "help") => {
            io::stdout().write_all(help().as_bytes())?;
            Ok(ExitCode::SUCCESS)
        }
        Some(WRITE_DOCUMENTS) => {
            let why = format!("{WRITE_DOCUMENTS} needs a directory");
            let directory = arguments.next().ok_or(cli::Usage(why))?;
            write_documents(Path::new(&directory))?;
            Ok(ExitCode::SUCCESS)
        }
        _ => match first.as_deref().and_then(applet) {
            // The command reads its arguments, and tells its name, as if it had been called by it.
            Some(applet) => Err(Command::new(std::env::current_exe()?)
                .arg0(format!("gemma4-{}", applet.name))
                .args(arguments)
                .exec()
                .into()),
            None => {
                let said = first.map_or("no command".to_owned(), |first| {
                    format!("there is no command `{}`", first.to_string_lossy().escape_debug())
                });
                Err(cli::Usage(format!("{said}; gemma4 --help tells which there are")).into())
            }
        },
    }
}

fn help() -> String {
    let mut text = "Run Gemma 4 on your own machine.\n\nUsage: gemma4 COMMAND …\n\n".to_owned();
    for applet in &APPLETS {
        let about = (applet.command)().get_about().map(ToString::to_string).unwrap_or_default();
        text += &format!("  {:<10}{}\n", applet.name, about.trim_end_matches('.'));
    }
    text + "\n`gemma4 COMMAND --help` explains one. Each is also called gemma4-COMMAND.\n"
}

/// Completions for three shells and a manual page for each command, where they lie in a prefix.
fn write_documents(prefix: &Path) -> anyhow::Result<()> {
    let write = |directory: &str, name: String, bytes: &[u8]| -> anyhow::Result<()> {
        let directory = prefix.join(directory);
        let path = directory.join(name);
        fs::create_dir_all(&directory)
            .and_then(|()| fs::write(&path, bytes))
            .with_context(|| format!("cannot write `{}`", path.display()))
    };
    let manuals = prefix.join("share/man/man1");
    let unwritable = || format!("cannot write into `{}`", manuals.display());
    fs::create_dir_all(&manuals).with_context(unwritable)?;
    for applet in &APPLETS {
        clap_mangen::generate_to((applet.command)(), &manuals).with_context(unwritable)?;
        let name = format!("gemma4-{}", applet.name);
        let complete = |shell| {
            let mut bytes = Vec::new();
            clap_complete::generate(shell, &mut (applet.command)(), &name, &mut bytes);
            bytes
        };
        write("share/bash-completion/completions", name.clone(), &complete(Shell::Bash))?;
        write("share/zsh/site-functions", format!("_{name}"), &complete(Shell::Zsh))?;
        write("share/fish/vendor_completions.d", format!("{name}.fish"), &complete(Shell::Fish))?;
    }
    Ok(())
}
