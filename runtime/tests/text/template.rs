use std::path::Path;
use std::process::Command;

use gemma4_runtime::text::{Chat, ChatTemplate, TextError};
use serde_json::{Value, json};

use crate::data;

/// Every rendering that `make_template_cases.py` made with Jinja2.
fn check_renderings(template: &ChatTemplate, cases: &Value) -> usize {
    let tokenizer = data::tokenizer();
    let tools = cases["tools"].as_array().unwrap();
    let renderings = cases["renderings"].as_array().unwrap();
    for case in renderings {
        let index = usize::try_from(case["conversation"].as_u64().unwrap()).unwrap();
        let chat = Chat {
            messages: cases["conversations"][index].as_array().unwrap(),
            tools: case["tools"].as_bool().unwrap().then_some(tools),
            enable_thinking: case["enable_thinking"].as_bool(),
            add_generation_prompt: case["add_generation_prompt"].as_bool().unwrap(),
        };
        let ours = template.render(&chat, &tokenizer);
        match (case["rendered"].as_str(), ours) {
            (Some(theirs), Ok(ours)) => assert_eq!(ours.text(), theirs, "{chat:#?}"),
            (None, Err(TextError::Template { .. })) => {}
            // A loop over none is empty here.
            (None, Ok(_)) if case["error"].as_str().unwrap().contains("'NoneType'") => {}
            (theirs, ours) => panic!("{theirs:?} became {ours:?} for {chat:#?}"),
        }
    }
    renderings.len()
}

#[test]
fn renderings_are_jinja2s() {
    let cases = data::read_json(&data::path("template_cases.json"));
    assert!(check_renderings(&data::template(), &cases) >= 150);
}

#[test]
fn renderings_of_the_released_template_are_jinja2s() {
    let Some(fixtures) = data::fixtures("the released template") else { return };
    let path = fixtures.join("gemma4/chat_template.jinja");
    let Some(cases) = jinja2(&path) else {
        println!("not run: the released template (python3 with jinja2 is not installed)");
        return;
    };
    let template = data::compile(&std::fs::read_to_string(&path).unwrap()).unwrap();
    assert!(check_renderings(&template, &cases) >= 300);
}

/// The renderings of a template by Jinja2, if it is installed.
fn jinja2(template: &Path) -> Option<Value> {
    let installed = Command::new("python3").args(["-c", "import jinja2"]).output().ok()?;
    if !installed.status.success() {
        return None;
    }
    let script = data::path("make_template_cases.py");
    let output =
        Command::new("python3").arg(script).arg("--template").arg(template).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Some(serde_json::from_slice(&output.stdout).unwrap())
}

/// Filters, methods and printed values, snippet by snippet.
#[test]
fn values_print_as_in_python() {
    let tokenizer = data::tokenizer();
    let cases = data::read_json(&data::path("snippet_cases.json"));
    let messages = [cases["message"].clone()];
    for case in cases["snippets"].as_array().unwrap() {
        let source = case["template"].as_str().unwrap();
        let chat = Chat { enable_thinking: None, ..data::chat(&messages) };
        let ours = data::compile(source).and_then(|template| template.render(&chat, &tokenizer));
        match (case["rendered"].as_str(), ours) {
            (Some(theirs), Ok(ours)) => assert_eq!(ours.text(), theirs, "{source}"),
            (None, Err(_)) => {}
            (theirs, ours) => panic!("{theirs:?} became {ours:?} for {source}"),
        }
    }
}

#[test]
fn arguments_written_as_a_string_are_read() {
    let Some(fixtures) = data::fixtures("arguments of tool calls") else { return };
    let source = std::fs::read_to_string(fixtures.join("gemma4/chat_template.jinja")).unwrap();
    let (template, tokenizer) = (data::compile(&source).unwrap(), data::tokenizer());
    let arguments = json!({"text": "said \"hi\" {", "nothing": null, "n": [1, 2.5]});
    let with = |arguments: Value| {
        let call = json!({"function": {"name": "f", "arguments": arguments}});
        let messages =
            [data::user("?"), json!({"role": "assistant", "content": null, "tool_calls": [call]})];
        template.render(&data::chat(&messages), &tokenizer).unwrap().text().to_owned()
    };
    let written = with(Value::String(arguments.to_string()));
    assert_eq!(written, with(arguments));
    assert!(written.contains("call:f{n:[1,2.5],nothing:None,text:<|\"|>said"), "{written}");
}

#[test]
fn errors_name_the_line() {
    let tokenizer = data::tokenizer();
    let messages = [data::user("Hi")];
    let render = |source: &str| {
        data::compile(source)
            .and_then(|template| template.render(&data::chat(&messages), &tokenizer))
            .unwrap_err()
    };
    for (source, line, part) in [
        ("a\n{% if %}", 2, "unexpected"),
        ("a\nb\n{{ x | no_such_filter }}", 3, "no_such_filter"),
        ("\n\n\n{{ messages[0].no_such_method() }}", 4, "no_such_method"),
        ("{{ missing.attribute }}", 1, "undefined"),
        ("{% include 'other' %}", 1, "other"),
    ] {
        let text = render(source).to_string();
        assert!(text.starts_with(&format!("chat template, line {line}: ")), "{text}");
        assert!(text.contains(part), "{text}");
    }
    match render("{% if true %}{{ raise_exception('roles must alternate') }}{% endif %}") {
        TextError::Refused { message } => assert_eq!(message, "roles must alternate"),
        other => panic!("{other}"),
    }
}
