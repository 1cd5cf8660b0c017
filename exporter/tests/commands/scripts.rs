//! What scripts rely on: JSON, many prompts, finish reasons, exit codes, saved contexts.

use std::fs;
use std::io::Write;
use std::process::Stdio;

use serde_json::{Value, json};

use super::{answer, run, text, with_files};

const FRANCE: [&str; 4] = ["--prompt", "What is the capital of France?", "--temperature", "0"];

fn parsed(arguments: &[&str]) -> Value {
    serde_json::from_str(&answer(arguments)).unwrap()
}

fn france(arguments: &[&str]) -> Vec<String> {
    FRANCE.iter().chain(arguments).map(|word| (*word).to_owned()).collect()
}

/// The finish reason and the text of an answer.
fn end(arguments: &[&str]) -> (String, String) {
    let arguments = france(&[arguments, &["--output", "json"]].concat());
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let answer = parsed(&arguments);
    let word = |name: &str| answer[name].as_str().unwrap().to_owned();
    (word("finish_reason"), word("text"))
}

#[test]
fn finish_reasons_say_why() {
    let whole = "The capital of France is Paris.";
    let said = |reason: &str, text: &str| (reason.to_owned(), text.to_owned());
    assert_eq!(end(&[]), said("stop", whole));
    assert_eq!(end(&["--max_new_tokens", "2"]), said("length", "The capital"));
    assert_eq!(end(&["--stop", "rance is P"]), said("stop_string", "The capital of F"));
    assert_eq!(end(&["--stop", "nowhere", "--stop", "."]), said("stop_string", &whole[..30]));
    assert_eq!(end(&["--stop", "-"]), said("stop", whole));
    let (reason, text) = end(&["--logit_bias", "619=1e6", "--detect_loops"]);
    assert_eq!((reason.as_str(), &text[..9]), ("loop", "TheTheThe"));
    // Every id that the checkpoint names ends an answer.
    for stop in ["1=1e6", "106=1e6"] {
        assert_eq!(end(&["--logit_bias", stop]), said("stop", ""));
    }
}

#[test]
fn json_has_what_its_description_says() {
    let arguments = france(&["--output", "jsonl", "--logprobs", "2", "--min_p", "0.1"]);
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let line = answer(&arguments);
    assert_eq!(line.lines().count(), 1);
    let answer: Value = serde_json::from_str(&line).unwrap();
    assert_eq!(answer["text"], "The capital of France is Paris.");
    assert!(answer["thought"].is_null() && answer["id"].is_null());
    let ids = answer["ids"].as_array().unwrap();
    let logprobs = answer["logprobs"].as_array().unwrap();
    assert_eq!((ids.len(), logprobs.len()), (9, 9));
    let spelled: String = logprobs.iter().map(|token| token["text"].as_str().unwrap()).collect();
    assert_eq!(spelled, "The capital of France is Paris.");
    for (id, token) in ids.iter().zip(logprobs) {
        assert_eq!((&token["id"], &token["top"][0]["id"]), (id, id), "greedy");
        let drawn = token["logprob"].as_f64().unwrap();
        assert!(drawn <= 0.0 && token["top"][0]["logprob"].as_f64() == Some(drawn));
        assert!(token["top"][1]["logprob"].as_f64().unwrap() < drawn);
    }
    let stats = &answer["stats"];
    assert_eq!((stats["prompt_tokens"].as_u64(), stats["seed"].as_u64()), (Some(25), None));
    assert!(stats["time_to_first_token_seconds"].as_f64().unwrap() > 0.0);
}

#[test]
fn many_prompts_are_independent_and_errors_do_not_end_the_run() {
    let prompts = [
        json!("What is the capital of France?"),
        json!({"id": "two", "prompt": "What is the capital of Spain?", "max_new_tokens": 3}),
        json!({"id": 3, "prompt": "word ".repeat(100)}),
        json!({"id": [4], "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "What is the capital of Italy?"}]},
        ]}),
        json!("What is the capital of France?"),
    ];
    let lines: Vec<String> = prompts.iter().map(Value::to_string).collect();
    let start = |format: &str| {
        let mut child = with_files("gemma4-run")
            .args(["--prompts", "-", "--temperature", "0", "--max_context", "90"])
            .args(["--output", format, "-q"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut stdin = child.stdin.take().unwrap();
        stdin.write_all((lines.join("\n\n") + "\n").as_bytes()).unwrap();
        drop(stdin);
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(1), "one prompt does not fit");
        assert_eq!(text(&output.stderr).lines().count(), 1, "{}", text(&output.stderr));
        text(&output.stdout)
    };
    let answers: Vec<Value> =
        start("jsonl").lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(answers.len(), 5);
    assert_eq!(answers[0]["text"], "The capital of France is Paris.");
    assert_eq!(
        (&answers[1]["id"], &answers[1]["finish_reason"]),
        (&json!("two"), &json!("length"))
    );
    assert_eq!(answers[2]["id"], 3);
    assert!(answers[2]["error"].as_str().unwrap().contains("the context holds 90 tokens"));
    assert_eq!(answers[3]["id"], json!([4]));
    assert!(answers[3]["text"].as_str().unwrap().contains("Rome"));
    assert_eq!(answers[4]["ids"], answers[0]["ids"]);
    assert_eq!(answers[4]["stats"]["reused_tokens"], 0);
    let document: Value = serde_json::from_str(&start("json")).unwrap();
    assert_eq!(document.as_array().unwrap().len(), 5);
    assert_eq!(start("text").lines().count(), 4);
}

#[test]
fn wrong_files_of_prompts_are_named_with_the_line() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("prompts.jsonl");
    for (content, words) in [
        ("", "there is no prompt in it"),
        ("\"a\"\n{\n", "line 2"),
        ("\"a\"\n\n7", "line 3: neither a string nor an object"),
        ("{\"prompt\": 1}", "line 1: `prompt` is not a string"),
        ("{\"id\": 1}", "neither `prompt` nor `messages`"),
        ("{\"prompt\": \"a\", \"seed\": -1}", "`seed` is no whole number"),
        ("{\"messages\": [{\"role\": \"x\"}]}", "message 1: the role `x`"),
    ] {
        fs::write(&file, content).unwrap();
        let output = run(&["--prompts", file.to_str().unwrap()]);
        let message = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{message}");
        assert!(message.contains(words) && message.contains("prompts.jsonl"), "{message}");
    }
}

#[test]
fn flags_that_do_not_go_together_are_refused() {
    let cases: [&[&str]; 10] = [
        &["--prompt", "x", "--messages", "y"],
        &["--prompt", "x", "-i"],
        &["--prompt", "x", "--logprobs", "1"],
        &["--prompt", "x", "--output", "json", "--thoughts", "hide"],
        &["-i", "--output", "json"],
        &["-i", "--raw_prompt"],
        &["--prompt", "x", "-q", "-v"],
        &["--prompt", "x", "--min_p", "2"],
        &["--prompt", "x", "--repetition_penalty", "0"],
        &["--prompt", "x", "--logit_bias", "7"],
    ];
    for arguments in cases {
        let output = run(arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {}", text(&output.stderr));
    }
}

#[test]
fn thinking_is_a_variable_of_the_template() {
    let prompt_of = |flags: &[&str]| {
        let arguments = france(&[flags, &["-v", "--max_new_tokens", "1"]].concat());
        let output = run(&arguments.iter().map(String::as_str).collect::<Vec<_>>());
        text(&output.stderr).lines().next().unwrap().to_owned()
    };
    let (off, on) = (prompt_of(&["--thinking", "off"]), prompt_of(&["--thinking", "on"]));
    assert_eq!(prompt_of(&[]), off);
    assert!(off.ends_with("<|turn>model\\n<|channel>thought\\n<channel|>\""), "{off}");
    assert!(on.contains("<|think|>") && on.ends_with("<|turn>model\\n\""), "{on}");
}

#[test]
fn thoughts_are_hidden_unless_they_are_wanted() {
    // A raw prompt that ends within a thought; the model's next words are thought.
    let prompt = ["--raw_prompt", "--temperature", "0", "--max_new_tokens", "6", "--prompt"];
    let prompt = [&prompt[..], &["<|channel>thought\nIn the beginning God"]].concat();
    let all = |thoughts: &[&str]| {
        let output = run(&[&prompt[..], thoughts, &["-q"]].concat());
        (text(&output.stdout), text(&output.stderr))
    };
    let (hidden, nothing) = all(&[]);
    assert_eq!((hidden.trim(), nothing.as_str()), ("", ""));
    let (shown, _) = all(&["--thoughts", "dim"]);
    assert!(!shown.trim().is_empty() && !shown.contains('\x1b'), "{shown:?}");
    let (rest, told) = all(&["--thoughts", "stderr"]);
    assert_eq!((rest.trim(), told.trim()), ("", shown.trim()));
    let answer = parsed(&[&prompt[..], &["--output", "json"]].concat());
    assert_eq!(answer["thought"].as_str().unwrap(), shown.trim());
    assert_eq!(answer["text"], "");
}

#[test]
fn a_saved_context_is_continued() {
    let dir = tempfile::tempdir().unwrap();
    let session = dir.path().join("session");
    let session = session.to_str().unwrap();
    let raw = ["--raw_prompt", "--temperature", "0", "--max_new_tokens", "8", "-q"];
    let begin = "In the beginning God created";
    let first = answer(&[&raw[..], &["--prompt", begin, "--save_session", session]].concat());
    let longer = format!("{begin}{}", first.trim_end_matches('\n'));
    let more = [&raw[..], &["--prompt", &longer]].concat();
    let whole = parsed(&[&more[..], &["--output", "json"]].concat());
    let loaded = parsed(&[&more[..], &["--output", "json", "--load_session", session]].concat());
    assert_eq!(loaded["ids"], whole["ids"]);
    let count = |answer: &Value, name: &str| answer["stats"][name].as_u64().unwrap();
    assert!(count(&loaded, "reused_tokens") > 8, "{loaded}");
    assert_eq!(
        count(&loaded, "reused_tokens") + count(&loaded, "prompt_tokens"),
        count(&whole, "prompt_tokens")
    );
    let mut bytes = fs::read(session).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(session, bytes).unwrap();
    let output = run(&[&more[..], &["--load_session", session]].concat());
    let message = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1));
    assert!(message.contains("checksum") && message.contains(session), "{message}");
}
