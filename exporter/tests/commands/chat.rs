//! Talking: turns, commands, interrupts.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, Command, Stdio};

use serde_json::{Value, json};

use super::{answer, text, with_files};

const QUESTIONS: [&str; 10] = [
    "What is the capital of France?",
    "What is the currency of Japan?",
    "What is the chemical symbol of nickel?",
    "What is the capital of Spain?",
    "How much is 2 plus 3?",
    "What is the capital of Italy?",
    "What is the currency of Turkey?",
    "Which continent is Kenya in?",
    "What is the capital of Poland?",
    "What is the capital of France?",
];

fn talk(arguments: &[&str], lines: &str) -> (String, String) {
    let mut child = with_files("gemma4-run")
        .args(["--interactive", "--temperature", "0"])
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(lines.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    (text(&output.stdout), text(&output.stderr))
}

/// Numbers of tokens that the lines after the answers tell: read and reused.
fn told(report: &str) -> Vec<[u64; 2]> {
    let lines = report.lines().filter(|line| line.contains(" tokens read, "));
    lines
        .map(|line| {
            let mut words = line.trim_start_matches('[').split(' ');
            [0, 2].map(|skip| words.nth(skip).unwrap().parse().unwrap())
        })
        .collect()
}

#[test]
fn ten_turns_are_what_each_would_be_from_scratch() {
    let (answers, report) = talk(&[], &(QUESTIONS.join("\n") + "\n"));
    let answers: Vec<&str> = answers.lines().collect();
    let told = told(&report);
    assert_eq!((answers.len(), told.len()), (10, 10), "{answers:?} {report}");
    let dir = tempfile::tempdir().unwrap();
    let (file, stats) = (dir.path().join("messages.json"), dir.path().join("stats.json"));
    let mut messages = Vec::new();
    let mut before = None;
    for ((question, answered), [read, reused]) in QUESTIONS.iter().zip(answers).zip(told) {
        messages.push(json!({"role": "user", "content": question}));
        fs::write(&file, Value::from(messages.clone()).to_string()).unwrap();
        let arguments = ["--messages", file.to_str().unwrap(), "--temperature", "0"];
        let stats_flag = ["--stats_json", stats.to_str().unwrap()];
        let scratch = answer(&[&arguments[..], &stats_flag].concat());
        assert_eq!(scratch, format!("{answered}\n"));
        let stats: Value = serde_json::from_slice(&fs::read(&stats).unwrap()).unwrap();
        let whole = stats["prompt_tokens"].as_u64().unwrap();
        assert_eq!(read + reused, whole);
        // The template begins an answer with an empty thought that is not part of the history, so
        // the conversation up to there stays: all of the last prompt but those tokens.
        assert_eq!(reused, before.map_or(0, |before: u64| before - THOUGHT));
        before = Some(whole);
        messages.push(json!({"role": "assistant", "content": answered}));
    }
    assert!(messages.len() == 20 && before.unwrap() > 300);
}

/// Tokens of `<|channel>thought\n<channel|>` in the bundled vocabulary.
const THOUGHT: u64 = 5;

#[test]
fn commands_change_the_conversation() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("a chat.json");
    let lines = format!(
        "/system Be brief.\nWhat is the capital of France?\n/save {0}\n/reset\n\
         What is the capital of Spain?\n/load {0}\nWhat is the capital of Italy?\n/stats\n/nonsense\n\
         /load nowhere.json\n\"\"\"\nWhat is the capital\nof Poland?\n\"\"\"\n/quit\nnever said\n",
        file.display()
    );
    let (answers, report) = talk(&["--verbose"], &lines);
    assert_eq!(answers.lines().count(), 4, "{answers}");
    // A question on two lines is too much for the small model.
    for city in ["Paris", "Madrid", "Rome"] {
        assert!(answers.contains(city), "{answers}");
    }
    let saved: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    assert_eq!(saved[0], json!({"role": "system", "content": "Be brief."}));
    assert_eq!(saved[2]["content"], "The capital of France is Paris.");
    let prompts: Vec<&str> = report.lines().filter(|line| line.starts_with("\"<bos>")).collect();
    assert!(prompts[1].contains("Be brief.") && !prompts[1].contains("France"), "{report}");
    assert!(prompts[2].contains("France") && !prompts[2].contains("Spain"), "{report}");
    assert!(prompts[3].contains("capital\\nof Poland?<turn|>"), "{report}");
    for words in ["[3 messages]", "no command /nonsense", "nowhere.json", "time to first token"] {
        assert!(report.contains(words), "{words}: {report}");
    }
}

#[test]
fn a_quiet_chat_prints_answers_alone() {
    let (answers, report) = talk(&["-q"], "What is the capital of France?\n");
    assert_eq!((answers.as_str(), report.as_str()), ("The capital of France is Paris.\n", ""));
}

#[test]
fn a_conversation_that_no_longer_fits_is_said_and_the_chat_goes_on() {
    let long = "word ".repeat(200);
    let lines = format!("{long}\nWhat is the capital of France?\n");
    let (answers, report) = talk(&["--max_context", "100"], &lines);
    assert_eq!(answers, "The capital of France is Paris.\n");
    assert!(report.contains("the context holds 100 tokens"), "{report}");
}

/// A chat whose answers do not end: no stop token may be drawn.
fn endless() -> Child {
    with_files("gemma4-run")
        .args(["-i", "--temperature", "0", "--logit_bias", "1=-inf,106=-inf"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

fn interrupt(child: &Child) {
    let id = child.id().to_string();
    assert!(Command::new("kill").args(["-INT", &id]).status().unwrap().success());
}

/// The next line of a report that holds these words.
fn line_with(report: &mut impl BufRead, words: &str) -> String {
    let mut line = String::new();
    while !line.contains(words) {
        line.clear();
        assert!(report.read_line(&mut line).unwrap() > 0, "no line with {words}");
    }
    line
}

#[test]
fn ctrl_c_ends_the_answer_and_not_the_chat() {
    let mut child = endless();
    let mut keyboard = child.stdin.take().unwrap();
    let mut screen = child.stdout.take().unwrap();
    let mut report = BufReader::new(child.stderr.take().unwrap());
    for question in ["What is the capital of France?", "And of Spain?"] {
        writeln!(keyboard, "{question}").unwrap();
        screen.read_exact(&mut [0; 20]).unwrap();
        interrupt(&child);
        let line = line_with(&mut report, "generated at");
        assert!(line.contains("interrupted"), "{line}");
    }
    // What was answered so far is part of the conversation.
    writeln!(keyboard, "/stats").unwrap();
    assert!(line_with(&mut report, "prompt:").contains("reused"));
    drop(keyboard);
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

/// Encoding this would take many seconds, and the context could not hold it.
#[test]
fn a_huge_prompt_is_refused_before_it_is_encoded() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("long.json");
    let messages = json!([{"role": "user", "content": "abc def ".repeat(4 << 20)}]);
    fs::write(&file, messages.to_string()).unwrap();
    let lines =
        format!("/load {}\nGo on.\n/reset\nWhat is the capital of France?\n", file.display());
    let (answers, report) = talk(&[], &lines);
    assert_eq!(answers, "The capital of France is Paris.\n");
    assert!(report.contains("tokens or more, and the context holds"), "{report}");
}

#[test]
fn an_idle_chat_ends_by_a_signal() {
    let mut child = endless();
    let mut report = BufReader::new(child.stderr.take().unwrap());
    line_with(&mut report, "/help");
    std::thread::sleep(std::time::Duration::from_millis(200));
    let id = child.id().to_string();
    assert!(Command::new("kill").args(["-TERM", &id]).status().unwrap().success());
    assert_eq!(child.wait().unwrap().code(), Some(130));
}
