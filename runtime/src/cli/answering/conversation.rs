//! What was said so far in a chat, and the commands that change it.

use std::path::{Path, PathBuf};
use std::{fs, mem};

use anyhow::Context;
use serde_json::{Value, json};

use super::answer::Answer;
use super::input;
use crate::text::Messages;

/// Told by `/help`.
pub(super) const HELP: &str = "\
/help          this list
/reset         forget the conversation; the system instructions stay
/system TEXT   replace the system instructions; without TEXT, remove them
/stats         figures of the last answer
/save FILE     write the conversation as JSON, in the shape of OpenAI's chat API
/load FILE     continue a conversation that was written so
/quit          end; so does Ctrl-D

A line that ends with \\ goes on on the next one, and so does a text that begins with \"\"\"
until another \"\"\". Ctrl-C ends an answer. Arrow keys edit the line and find earlier ones.
";

/// A line that was typed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Line {
    /// To be said to the model.
    Say(String),
    Help,
    Reset,
    System(Option<String>),
    Stats,
    Save(PathBuf),
    Load(PathBuf),
    Quit,
    /// Nothing but spaces.
    Nothing,
    /// A command that is none; what is wrong with it.
    Wrong(String),
}

impl Line {
    /// Reads a typed text. Only one that begins with `/` and a letter is a command.
    pub(super) fn parse(text: &str) -> Self {
        let trimmed = text.trim();
        let command = trimmed
            .strip_prefix('/')
            .filter(|rest| rest.starts_with(|c: char| c.is_ascii_alphabetic()));
        let Some(command) = command else {
            return if trimmed.is_empty() { Line::Nothing } else { Line::Say(joined(text)) };
        };
        let (name, rest) = match command.split_once(char::is_whitespace) {
            Some((name, rest)) => (name, rest.trim()),
            None => (command, ""),
        };
        match (name, rest) {
            ("help", "") => Line::Help,
            ("reset", "") => Line::Reset,
            ("system", "") => Line::System(None),
            ("system", text) => Line::System(Some(joined(text))),
            ("stats", "") => Line::Stats,
            ("quit" | "exit", "") => Line::Quit,
            ("save" | "load", "") => Line::Wrong(format!("/{name} needs a file's name")),
            ("save", file) => Line::Save(file.into()),
            ("load", file) => Line::Load(file.into()),
            ("help" | "reset" | "stats" | "quit" | "exit", _) => {
                Line::Wrong(format!("nothing may follow /{name}"))
            }
            _ => Line::Wrong(format!("there is no command /{name}; /help tells which there are")),
        }
    }

    /// Whether a typed text goes on on the next line.
    pub(super) fn goes_on(text: &str) -> bool {
        let quoted = text.trim_start().starts_with(QUOTES);
        match quoted {
            true => text.matches(QUOTES).count() < 2,
            false => text.chars().rev().take_while(|c| *c == '\\').count() % 2 == 1,
        }
    }
}

/// What encloses a text of several lines.
const QUOTES: &str = "\"\"\"";

/// A typed text without what made it go on over several lines.
fn joined(text: &str) -> String {
    let quoted = text.trim().strip_prefix(QUOTES).and_then(|text| text.strip_suffix(QUOTES));
    match quoted {
        Some(text) => text.trim_matches('\n').to_owned(),
        None => text.replace("\\\n", "\n").trim().to_owned(),
    }
}

/// The messages of a chat.
#[derive(Clone, Debug, Default)]
pub(super) struct Conversation {
    system: Option<String>,
    said: Vec<Value>,
    tools: Vec<Value>,
}

impl Conversation {
    pub(super) fn new(system: Option<String>) -> Self {
        Self { system, ..Self::default() }
    }

    pub(super) fn set_system(&mut self, system: Option<String>) {
        self.system = system;
    }

    /// Forgets what was said.
    pub(super) fn reset(&mut self) {
        self.said.clear();
    }

    /// Adds what the user says.
    pub(super) fn ask(&mut self, text: String) {
        self.said.push(json!({"role": "user", "content": text}));
    }

    /// Takes back what the user said last, since nothing was answered.
    pub(super) fn take_back(&mut self) {
        self.said.pop();
    }

    /// Adds an answer. Its thoughts stand apart, and the template decides how long they matter.
    pub(super) fn answer(&mut self, answer: &Answer) {
        let mut message = json!({"role": "assistant", "content": answer.text});
        let thought = answer.thought.trim();
        if let Some(message) = message.as_object_mut().filter(|_| !thought.is_empty()) {
            message.insert("reasoning".to_owned(), thought.into());
        }
        self.said.push(message);
    }

    /// All of it, for the template.
    pub(super) fn messages(&self) -> Messages {
        let system = self.system.iter().map(|text| json!({"role": "system", "content": text}));
        let messages = system.chain(self.said.iter().cloned()).collect();
        Messages { messages, tools: self.tools.clone() }
    }

    /// Writes the messages; with `tools`, where there are some, as an object.
    pub(super) fn save(&self, path: &Path) -> anyhow::Result<()> {
        let Messages { messages, tools } = self.messages();
        let value = match tools.is_empty() {
            true => Value::Array(messages),
            false => json!({"messages": messages, "tools": tools}),
        };
        let json = serde_json::to_string_pretty(&value)?;
        fs::write(path, json + "\n").with_context(|| format!("cannot write `{}`", path.display()))
    }

    /// Reads messages in place of these, and returns how many there are.
    pub(super) fn load(&mut self, path: &Path) -> anyhow::Result<usize> {
        let read = Messages::from_json(&input::read_text(path)?)
            .with_context(|| format!("cannot read `{}`", path.display()))?;
        let count = read.messages.len();
        let mut said = read.messages;
        let system = said.first().filter(|message| message["role"] == "system");
        let system = system.and_then(|message| message["content"].as_str().map(str::to_owned));
        if system.is_some() {
            said = said.split_off(1);
        }
        *self = Self { system, said: mem::take(&mut said), tools: read.tools };
        Ok(count)
    }
}

#[cfg(test)]
mod tests {
    use super::{Answer, Conversation, Line};

    #[test]
    fn thoughts_stand_apart_from_answers() {
        let mut conversation = Conversation::new(None);
        conversation.ask("Hi".to_owned());
        let (text, thought) = ("Hello".to_owned(), "\nGreet.\n".to_owned());
        conversation.answer(&Answer { text, thought, ..Answer::interrupted() });
        conversation.ask("Bye".to_owned());
        conversation.answer(&Answer { text: "Bye".to_owned(), ..Answer::interrupted() });
        let messages = conversation.messages().messages;
        assert_eq!(messages[1]["content"], "Hello");
        assert_eq!(messages[1]["reasoning"], "Greet.");
        assert!(messages[3].get("reasoning").is_none());
        conversation.take_back();
        assert_eq!(conversation.messages().messages.len(), 3);
    }

    #[test]
    fn commands_are_told_from_what_is_said() {
        for (text, line) in [
            ("/help", Line::Help),
            ("  /quit  ", Line::Quit),
            ("/system Be brief. ", Line::System(Some("Be brief.".into()))),
            ("/system", Line::System(None)),
            ("/save my file.json", Line::Save("my file.json".into())),
            ("  ", Line::Nothing),
            ("/ 2", Line::Say("/ 2".into())),
            ("/2", Line::Say("/2".into())),
            (" a \\\n/help", Line::Say("a \n/help".into())),
            ("\"\"\"\n/reset\n\n b\n\"\"\"", Line::Say("/reset\n\n b".into())),
        ] {
            assert_eq!(Line::parse(text), line, "{text:?}");
        }
        for text in ["/save", "/nothing", "/reset now", "/etc/passwd"] {
            assert!(matches!(Line::parse(text), Line::Wrong(_)), "{text}");
        }
    }

    #[test]
    fn a_text_may_go_on() {
        for text in ["a\\", "\\", "a\\\\\\", "\"\"\"", " \"\"\" a\\\\ \n b"] {
            assert!(Line::goes_on(text), "{text:?}");
        }
        for text in ["", "a", "a\\\\", "\"\"\"a\"\"\"", "\"\"\"a\nb\"\"\"", "say \"\"\""] {
            assert!(!Line::goes_on(text), "{text:?}");
        }
    }
}
