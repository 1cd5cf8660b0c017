//! Talking with the model.

use std::io::{self, IsTerminal};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::{env, fs};

use rustyline::completion::Completer;
use rustyline::error::ReadlineError;
use rustyline::highlight::Highlighter;
use rustyline::hint::Hinter;
use rustyline::history::DefaultHistory;
use rustyline::validate::{ValidationContext, ValidationResult, Validator};
use rustyline::{Config, Editor, Helper};

use super::Runner;
use super::answer::{Answer, End};
use super::conversation::{Conversation, HELP, Line};
use super::printer::Printer;
use super::prompt::Prompt;
use super::stats::Stats;
use crate::cli;

/// Signals during an answer that end only the answer; the next one ends the program.
const PATIENCE: u32 = 2;
/// Lines that are remembered.
const REMEMBERED: usize = 1000;

/// Reads what the user says, line by line, and answers, until the user ends it.
pub(super) fn talk(runner: &mut Runner<'_>) -> anyhow::Result<ExitCode> {
    let terminal = io::stdin().is_terminal();
    let mut keyboard = Keyboard::new(runner.arguments.history.clone(), terminal)?;
    let mut chat = Chat {
        conversation: Conversation::new(runner.arguments.system.clone()),
        printer: Printer::new(runner.arguments.thoughts),
        last: None,
        runner,
    };
    if !chat.runner.arguments.quiet {
        cli::say(&chat.runner.place.text());
        cli::say("/help tells the commands, Ctrl-D ends\n");
    }
    loop {
        chat.runner.interrupt.allow(0);
        let Some(text) = keyboard.line()? else { break };
        match chat.obey(Line::parse(&text)) {
            Ok(true) => {}
            Ok(false) => break,
            Err(error) if cli::is_broken_pipe(&error) => return Err(error),
            Err(error) => cli::say(&format!("error: {}\n", cli::sentence(&error))),
        }
    }
    keyboard.remember();
    Ok(ExitCode::SUCCESS)
}

struct Chat<'a, 'r> {
    runner: &'a mut Runner<'r>,
    conversation: Conversation,
    printer: Printer,
    last: Option<(Answer, Stats)>,
}

impl Chat<'_, '_> {
    /// Does what a line says, and returns whether another one is wanted.
    fn obey(&mut self, line: Line) -> anyhow::Result<bool> {
        match line {
            Line::Nothing => {}
            Line::Quit => return Ok(false),
            Line::Help => cli::say(HELP),
            Line::Wrong(why) => cli::say(&format!("{why}\n")),
            Line::Reset => self.conversation.reset(),
            Line::System(text) => self.conversation.set_system(text),
            Line::Save(path) => self.conversation.save(&path)?,
            Line::Load(path) => {
                let count = self.conversation.load(&path)?;
                cli::say(&format!("[{count} messages]\n"));
            }
            Line::Stats => match &self.last {
                Some((answer, stats)) => cli::say(&stats.text(&self.runner.place, answer)),
                None => cli::say("nothing was answered yet\n"),
            },
            Line::Say(text) => {
                self.conversation.ask(text);
                let answered = self.answer();
                match &answered {
                    Ok(true) => {}
                    Ok(false) => {
                        cli::say("[interrupted before the answer; the question is forgotten]\n");
                        self.conversation.take_back();
                    }
                    Err(_) => self.conversation.take_back(),
                }
                answered?;
            }
        }
        Ok(true)
    }

    /// Answers the conversation; false if the user interrupts before the first token.
    fn answer(&mut self) -> anyhow::Result<bool> {
        let runner = &mut *self.runner;
        runner.interrupt.allow(PATIENCE);
        let prompt = Prompt::Chat(self.conversation.messages());
        let ids = runner.prompter.encode_or_interrupt(prompt, runner.interrupt.flag())?;
        let Some(ids) = ids else { return Ok(false) };
        let request = runner.request(ids);
        let (answer, stats) = runner.ask(&request, Some(&mut self.printer))?;
        if answer.end == End::Interrupted && answer.ids.is_empty() {
            return Ok(false);
        }
        self.printer.end()?;
        if !runner.arguments.quiet {
            cli::say(&Stats::line(&answer));
        }
        self.conversation.answer(&answer);
        self.last = Some((answer, stats));
        Ok(true)
    }
}

/// The line editor: of a terminal, else simply the lines of stdin.
struct Keyboard {
    editor: Editor<Lines, DefaultHistory>,
    history: Option<PathBuf>,
    prompt: &'static str,
}

impl Keyboard {
    fn new(history: Option<PathBuf>, terminal: bool) -> anyhow::Result<Self> {
        let config = Config::builder().max_history_size(REMEMBERED)?.build();
        let mut editor = Editor::with_config(config)?;
        editor.set_helper(Some(Lines));
        let history = history.or_else(default_history).filter(|_| terminal);
        if let Some(path) = &history {
            // The first time there is none.
            let _ = editor.load_history(path);
        }
        Ok(Self { editor, history, prompt: if terminal { "> " } else { "" } })
    }

    /// What is typed, without its last line feed; `None` at the end.
    fn line(&mut self) -> anyhow::Result<Option<String>> {
        loop {
            match self.editor.readline(self.prompt) {
                Ok(line) => {
                    self.editor.add_history_entry(&line)?;
                    return Ok(Some(line));
                }
                Err(ReadlineError::Interrupted) => cli::say("(/quit or Ctrl-D ends)\n"),
                Err(ReadlineError::Eof) => return Ok(None),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Keeps the lines for the next time. Where that fails, nothing else does.
    fn remember(&mut self) {
        let Some(path) = &self.history else { return };
        if let Some(directory) = path.parent() {
            let _ = fs::create_dir_all(directory);
        }
        let _ = self.editor.append_history(path);
    }
}

/// `gemma4/history` in the user's state directory, as the XDG base directory specification has it.
fn default_history() -> Option<PathBuf> {
    let absolute = |path: PathBuf| Some(path).filter(|path| path.is_absolute());
    let state = env::var_os("XDG_STATE_HOME").and_then(|path| absolute(path.into()));
    let home = || Some(Path::new(&env::var_os("HOME")?).join(".local/state"));
    Some(state.or_else(home)?.join("gemma4/history"))
}

/// Knows when a text is complete.
struct Lines;

impl Validator for Lines {
    fn validate(&self, context: &mut ValidationContext<'_>) -> rustyline::Result<ValidationResult> {
        Ok(match Line::goes_on(context.input()) {
            true => ValidationResult::Incomplete,
            false => ValidationResult::Valid(None),
        })
    }
}

impl Completer for Lines {
    type Candidate = String;
}

impl Hinter for Lines {
    type Hint = String;
}

impl Highlighter for Lines {}

impl Helper for Lines {}
